"""lptctl: one sweep YAML in, a verdict out. The control plane; it never imports torch."""

__version__ = "0.1.0"
