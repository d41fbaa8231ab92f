"""What must hold before any test module is imported."""

from __future__ import annotations

import os

# Triton decides when it is first imported whether it interprets kernels, and any module may import it first. Tests run
# on CPU tensors; `make test-gpu` says 0 and runs the compiled kernels.
os.environ.setdefault("TRITON_INTERPRET", "1")
