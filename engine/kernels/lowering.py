"""Compile the GEMM kernels for GPUs that are not there, and say what they became.

``python -m engine.kernels.lowering [--target hip:gfx950] [--case wgrad] [--json]`` needs Triton and no GPU. It prints
for each GEMM the matrix instruction, the registers and shared memory of a program, and what spilled to local memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton.compiler import ASTSource

from engine.kernels.assembly import TARGETS, resources
from engine.kernels.gemm import GemmTile
from engine.kernels.gemm_kernel import gemm_kernel

NATIVE = ("hip:gfx950", "cuda:100")
"""Targets whose matrix units take MXFP4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One GEMM of a training step, as the kernel sees it."""

    unit: tuple[str, ...]
    """Strides that are 1 for contiguous tensors."""
    grouped: int = 0
    """As in the kernel: 0 dense, 1 grouped rows, 2 grouped sum."""
    b_tiled: bool = False
    """B is a weight in 32x32 tiles."""
    ragged: bool = False
    """No axis ends on a whole tile, as with 2880 values."""


_TILE_FIELDS = ("bm", "bn", "bk", "num_warps", "num_stages")
_FPROP = ("a_stride_k", "a_scale_stride_k", "b_stride_k", "b_scale_stride_k", "y_stride_n")
_DGRAD = ("a_stride_k", "a_scale_stride_k", "b_stride_n", "b_scale_stride_n", "y_stride_n")
_WGRAD = ("a_stride_m", "a_scale_stride_m", "b_stride_n", "b_scale_stride_n", "y_stride_n")
CASES = {
    "fprop": Case(unit=_FPROP, b_tiled=True),
    "dgrad": Case(unit=_DGRAD, b_tiled=True),
    "wgrad": Case(unit=_WGRAD),
    "grouped_fprop": Case(unit=_FPROP, grouped=1, b_tiled=True, ragged=True),
    "grouped_dgrad": Case(unit=_DGRAD, grouped=1, b_tiled=True, ragged=True),
    "grouped_wgrad": Case(unit=_WGRAD, grouped=2, ragged=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """What a kernel became on one target."""

    target: str
    case: str
    tile: str
    """Rows x columns x depth of a program, and its warps."""
    instructions: list[str]
    """Matrix instructions in the assembly, each once."""
    registers: int
    """Vector registers a thread."""
    spills: int
    """Spilled registers (hip), or bytes of spill stores and loads (cuda)."""
    local_bytes: int
    """Local (scratch) memory a thread."""
    shared_bytes: int
    """Shared memory a program."""


def compile_gemm(case: Case, target: str, tile: GemmTile) -> Any:
    """Compile the packed GEMM for a target as Triton would for large contiguous operands."""
    names = list(gemm_kernel.arg_names)
    native = target in NATIVE
    constants: dict[str, Any] = {
        "ALPHA": 1.0,
        "PACKED": True,
        "NATIVE": native,
        "DOT": triton.language.bfloat16,
        "GROUPED": case.grouped,
        "SLOTS": 64 if case.grouped else 1,
        "A_TILED": False,
        "B_TILED": case.b_tiled,
        "MASK_M": case.ragged,
        "MASK_N": case.ragged,
        "MASK_K": case.ragged,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "BAND": tile.band,
        "STAGES": tile.num_stages,
        **dict.fromkeys(case.unit, 1),
    }
    pointers = {"y_ptr": "*bf16", "ends_ptr": "*i32"}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "*u8") if name.endswith("_ptr") else "i32"
        for name in names
    }
    # Scale rows are short: their strides and the number of groups divide by nothing in particular.
    aligned = [
        i
        for i, name in enumerate(names)
        if name not in constants and name != "G" and ("scale" not in name or name.endswith("_ptr"))
    ]
    source = ASTSource(
        gemm_kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(
        source, target=TARGETS[target], options={"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    )


def inspect(name: str, target: str, tile: GemmTile) -> Lowering:
    """Compile one case for one target and read its assembly."""
    kernel = compile_gemm(CASES[name], target, tile)
    if target.startswith("hip"):
        found = re.findall(r"\bv_mfma_\w+", kernel.asm["amdgcn"])
    else:
        found = re.findall(r"\b(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*", kernel.asm["ptx"])
    taken = resources(kernel, target)
    return Lowering(
        target=target,
        case=name,
        tile=f"{tile.bm}x{tile.bn}x{tile.bk}, {tile.num_warps} warps",
        instructions=sorted(set(found)),
        registers=taken.registers,
        spills=taken.spills,
        local_bytes=taken.local_bytes,
        shared_bytes=kernel.metadata.shared,
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.lowering", description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="*", default=list(TARGETS), choices=list(TARGETS), help="GPUs to compile for")
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES), help="GEMMs")
    for field in _TILE_FIELDS:
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, help=f"{field} of the program")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    changed = {f: getattr(args, f) for f in _TILE_FIELDS if getattr(args, f)}
    rows = []
    for target in args.target:
        tile = dataclasses.replace(GemmTile.default(native=target in NATIVE), **changed)
        rows += [inspect(case, target, tile) for case in args.case]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(f"Triton {triton.__version__}\n")
    print("| target | GEMM | tile | matrix instruction | registers | spills | local bytes | shared bytes |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    for row in rows:
        cells = (row.target, row.case, row.tile, ", ".join(row.instructions), row.registers, row.spills)
        print("| " + " | ".join(map(str, (*cells, row.local_bytes, row.shared_bytes))) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
