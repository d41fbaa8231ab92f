"""Compile the quantise kernels for GPUs that are not there, and say what a thread of them takes.

``python -m engine.kernels.quantise_lowering [--target cuda:90] [--json]`` needs Triton and no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from engine.formats import OperandOptions, make_hadamard
from engine.formats.mxfp4 import layout_of
from engine.formats.mxfp8 import MXFP8Options
from engine.kernels import launch
from engine.kernels.assembly import TARGETS, resources
from engine.kernels.hadamard import DeviceHadamard
from engine.kernels.launch import Draw, Launch
from engine.kernels.operand import Operand

SHAPE = (4096, 8192)
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """What a quantise kernel became on one target."""

    target: str
    case: str
    tile: str
    """Rows or columns of a program, and its warps."""
    registers: int
    """Vector registers a thread."""
    spills: int
    """Spilled registers (hip), or bytes of spill stores and loads (cuda)."""
    local_bytes: int
    """Local (scratch) memory a thread."""
    shared_bytes: int
    """Shared memory a program."""
    widest_access: int
    """Bytes of the widest load or store of global memory (cuda); 0 elsewhere."""
    flushes: int
    """Floating-point instructions that flush subnormal numbers to zero (cuda); 0 elsewhere."""


def _on_meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _draw(options: OperandOptions) -> Draw:
    transform = None
    if options.hadamard != "none":
        transform = DeviceHadamard.from_transform(make_hadamard(options.hadamard, seed=1, step=1), "meta")
    key = _on_meta(1, dtype=torch.int64) if options.rounding == "sr" else None
    return Draw(key=key, transform=transform, first=0)


def _codes_and_scales(options: OperandOptions) -> tuple[Tensor, Tensor]:
    layout = layout_of(torch.Size(SHAPE), options)
    halved = [size // 2 if dim == layout.axis else size for dim, size in enumerate(SHAPE)]
    return _on_meta(*halved, dtype=torch.uint8), _on_meta(*layout.scales, dtype=torch.uint8)


def _two(rows: OperandOptions, columns: OperandOptions, pairs: bool) -> Launch:
    x, out = _on_meta(*SHAPE, dtype=torch.bfloat16), _on_meta(*SHAPE, dtype=torch.bfloat16)
    operands = Operand.of(rows, 2), Operand.of(columns, 2)
    count = _on_meta(2, dtype=torch.int64)
    draws = _draw(rows), _draw(columns)
    return launch.quantise_two(x, *operands, draws, (out, out), (None, None), count, pairs=pairs)


def cases(*, pairs: bool) -> Iterator[tuple[str, Launch]]:
    """Yield a name and a launch for every kernel and the options that a recipe uses.

    ``pairs``: whether the GPU computes on pairs, see ``launch.computes_on_pairs``.
    """
    x, out = _on_meta(*SHAPE, dtype=torch.bfloat16), _on_meta(*SHAPE, dtype=torch.bfloat16)
    count = _on_meta(dtype=torch.int64)
    rtn, sr = OperandOptions(), OperandOptions(rounding="sr")
    columns, columns_sr = OperandOptions(axis=-2), OperandOptions(axis=-2, rounding="sr")
    hadamard = OperandOptions(axis=-2, hadamard="random")
    hadamard_sr = OperandOptions(axis=-2, hadamard="random", rounding="sr")
    tiles = OperandOptions(block="2d")
    named = {
        "rows": rtn,
        "rows, SR": sr,
        "rows, Hadamard": OperandOptions(hadamard="random"),
        "rows, Hadamard, SR": OperandOptions(hadamard="random", rounding="sr"),
        "columns": columns,
        "columns, SR": columns_sr,
        "columns, Hadamard": hadamard,
        "columns, Hadamard, SR": hadamard_sr,
        "tiles": tiles,
    }
    for name, options in named.items():
        operand = Operand.of(options, 2)
        yield f"QDQ {name}", launch.quantise(x, operand, _draw(options), out, None, count, pairs=pairs)
    for name in ("rows", "rows, SR", "columns", "columns, Hadamard", "tiles"):
        options = named[name]
        codes, scales = _codes_and_scales(options)
        operand = Operand.of(options, 2)
        yield f"quantise {name}", launch.quantise(x, operand, _draw(options), codes, scales, None, pairs=pairs)
    for name in ("rows", "columns", "tiles"):
        codes, scales = _codes_and_scales(named[name])
        yield f"dequantise {name}", launch.dequantise(codes, scales, x.shape, Operand.of(named[name], 2), out)
    yield "two orientations", _two(rtn, columns, pairs)
    yield "two orientations, columns with Hadamard and SR", _two(rtn, hadamard_sr, pairs)
    yield "two orientations, both SR, columns with Hadamard", _two(sr, hadamard_sr, pairs)
    eight = Operand.of_fp8(MXFP8Options(), 2)
    yield "QDQ rows, E4M3", launch.quantise(x, eight, launch.NO_DRAW, out, None, count, pairs=pairs)


def compile_launch(start: Launch, target: str) -> Any:
    """Compile a launch's kernel for one of the targets, as Triton would for aligned tensors."""
    names = start.kernel.arg_names
    arguments = dict(zip(names, start.arguments, strict=False))
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        value = arguments.get(name)
        if isinstance(value, Tensor):
            signature[name] = _POINTERS[value.dtype]
        else:
            signature[name] = "constexpr" if name in start.constants else "i32"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    constants = {(names.index(name),): value for name, value in start.constants.items()}
    source = ASTSource(start.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS[target], options=start.options)


def inspect(name: str, start: Launch, target: str) -> Lowering:
    """Compile one case for one target and read its assembly."""
    kernel = compile_launch(start, target)
    taken = resources(kernel, target)
    ptx = kernel.asm.get("ptx", "")
    accesses = re.findall(r"\b(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return Lowering(
        target=target,
        case=name,
        tile=f"{start.constants.get('R', start.constants.get('C'))}, {start.num_warps} warps",
        registers=taken.registers,
        spills=taken.spills,
        local_bytes=taken.local_bytes,
        shared_bytes=kernel.metadata.shared,
        widest_access=max((int(count or 1) * int(bits) // 8 for count, bits in accesses), default=0),
        flushes=len(re.findall(r"\.ftz", ptx)),
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.quantise_lowering", description=__doc__)
    parser.add_argument("--target", nargs="*", default=["cuda:90"], choices=list(TARGETS), help="GPUs to compile for")
    parser.add_argument("--case", nargs="*", choices=[name for name, _ in cases(pairs=False)], help="default: all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    rows = [
        inspect(name, start, target)
        for target in args.target
        for name, start in cases(pairs=target.startswith("cuda"))
        if args.case is None or name in args.case
    ]
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(f"Triton {triton.__version__}\n")
    print("| target | kernel | tile | registers | spills | local bytes | shared bytes |")
    print("|---|---|---|---:|---:|---:|---:|")
    for row in rows:
        cells = (row.target, row.case, row.tile, row.registers, row.spills, row.local_bytes, row.shared_bytes)
        print("| " + " | ".join(map(str, cells)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
