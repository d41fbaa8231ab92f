"""The CPU path: MXFP4 quantise-dequantise compiled from C where there is a compiler, else the PyTorch reference."""

from engine.kernels.cpu.select import describe_path, qdq

__all__ = ["describe_path", "qdq"]
