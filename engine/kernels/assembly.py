"""Reading what Triton's compilers made of a kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "hip:gfx950": GPUTarget("hip", "gfx950", 64),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What a thread of a compiled kernel takes."""

    registers: int
    """Vector registers."""
    spills: int
    """Spilled registers (hip), or bytes of spill stores and loads (cuda)."""
    local_bytes: int
    """Local (scratch) memory."""


def resources(kernel: Any, target: str) -> Resources:
    """Return the resources of a kernel that ``triton.compile`` made for one of :data:`TARGETS`."""
    if target.startswith("hip"):
        text = kernel.asm["amdgcn"]
        return Resources(
            registers=number(text, r"\.vgpr_count:\s*(\d+)"),
            spills=sum(number(text, rf"\.{kind}_spill_count:\s*(\d+)") for kind in ("vgpr", "sgpr")),
            local_bytes=number(text, r"\.private_segment_fixed_size:\s*(\d+)"),
        )
    log = ptxas_log(kernel.asm["ptx"], TARGETS[target].arch)
    return Resources(
        registers=number(log, r"Used (\d+) registers"),
        spills=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        local_bytes=number(log, r"(\d+) bytes stack frame"),
    )


def number(text: str, pattern: str) -> int:
    """Return the number that a pattern's group finds first.

    Raises:
        RuntimeError: if the pattern is not there.
    """
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"the compiler's output holds nothing like {pattern!r}")
    return int(match[1])


def ptxas_log(ptx: str, arch: int) -> str:
    """Return what Triton's own ptxas says of a PTX text under -v."""
    tools = triton.knobs.nvidia
    tool = tools.ptxas_blackwell if arch >= 100 else tools.ptxas
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name=sm_{arch}a", str(path), "-o", str(path.with_suffix(".cubin"))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
