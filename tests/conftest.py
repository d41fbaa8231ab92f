"""What must hold before any test module is imported."""

from __future__ import annotations

import os
import signal

# Triton decides when it is first imported whether it interprets kernels, and any module may import it first. Tests run
# on CPU tensors; `make test-gpu` says 0 and runs the compiled kernels.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts background jobs with SIGINT ignored, and programs started by tests would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
