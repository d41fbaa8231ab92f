"""Which code quantises tensors of a device, and why; nothing here imports Triton before it is asked for.

The environment variable ``LPTCTL_KERNELS`` decides: ``auto`` (default), ``reference`` (never a kernel) or ``triton``
(a kernel or an error; with TRITON_INTERPRET=1 on CPU tensors too, line by line and slowly, for tests).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Literal

import torch

from engine.kernels.cpu.build import load

VARIABLE = "LPTCTL_KERNELS"
_CHOICES = ("auto", "reference", "triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelPath:
    """Which implementation serves a device."""

    path: Literal["triton", "interpreter", "compiled", "reference"]
    """``triton``: GPU kernels; ``interpreter``: those in Triton's interpreter; ``compiled``: C; else PyTorch."""
    device: str
    """Device type and, on a GPU, its name."""
    why: str
    """One sentence: what was found and, where a kernel is not used, what would change that."""

    @property
    def uses_kernels(self) -> bool:
        """Tell whether Triton kernels run."""
        return self.path in ("triton", "interpreter")


def kernel_path(device: torch.device | str = "cpu") -> KernelPath:
    """Return the implementation for tensors of a device.

    The first call for a GPU compiles small kernels there and compares their results with the reference's.

    Raises:
        ValueError: if ``LPTCTL_KERNELS`` is none of its values.
        RuntimeError: if it says ``triton`` and no kernel can run, or a kernel's result is wrong.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in _CHOICES:
        raise ValueError(f"{VARIABLE}={choice!r} is not one of {', '.join(_CHOICES)}")
    found = _probe(torch.device(device), choice)
    if choice == "triton" and not found.uses_kernels:
        raise RuntimeError(f"{VARIABLE}=triton, but no kernel can run on {found.device}: {found.why}")
    return found


@functools.lru_cache(maxsize=64)
def _probe(device: torch.device, choice: str) -> KernelPath:
    name = f"{device.type} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type

    def reference(why: str) -> KernelPath:
        return KernelPath(path="reference", device=name, why=why)

    if choice == "reference":
        return reference(f"{VARIABLE}=reference asks for it.")
    if device.type == "cpu" and choice == "auto":
        path: Literal["compiled", "reference"] = "compiled" if load().library is not None else "reference"
        return KernelPath(path=path, device=name, why=load().reason)
    if device.type not in ("cpu", "cuda"):
        return reference(f"the kernels are for CUDA and ROCm devices, not {device.type}.")
    try:
        import triton
    except ImportError as error:
        return reference(f"Triton is not installed ({error}); install the triton that your torch names.")
    interpreted = triton.knobs.runtime.interpret
    if device.type == "cpu" and not interpreted:
        return reference("Triton has no CPU back end; set TRITON_INTERPRET=1 before Python starts to interpret.")
    where = f"Triton {triton.__version__}" + ("'s interpreter" if interpreted else "")
    from engine.kernels import selftest

    try:
        wrong = selftest.differing_cases(device)
    # Triton raises many kinds where a target, a driver or a compiler is missing; each means no kernel here.
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return reference(f"{where} cannot compile or run the kernels: {type(error).__name__}: {first}")
    if wrong:
        return reference(f"{where} gives other bits than the reference in {', '.join(wrong)}.")
    return KernelPath(
        path="interpreter" if interpreted else "triton",
        device=name,
        why=f"{where} runs the kernels, and {selftest.CASES} small cases equal the reference bit for bit.",
    )
