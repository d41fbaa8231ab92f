"""From a tensor and its options to a kernel launch: shapes, constants, tiles. Nothing here starts a kernel.

Every case is one matrix [M, K] for the kernels. Blocks along the last dimension: its rows of 32 values. Blocks along
another: the dimensions up to it are the rows, those behind it the columns. 32x32 tiles: all but the last dimension are
the rows. Row-major order is the same in all of them, so nothing moves, and the noise's element index stays.

Importing this module imports Triton.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.formats.options import BLOCK_SIZE
from engine.kernels.expand import expand_columns_kernel, expand_rows_kernel
from engine.kernels.hadamard import DeviceHadamard
from engine.kernels.numerics import INTERPRETED
from engine.kernels.oneway import columns_kernel, rows_kernel
from engine.kernels.operand import E2M1, Operand
from engine.kernels.paired import columns_paired_kernel, rows_paired_kernel
from engine.kernels.paired_down import down_paired_kernel
from engine.kernels.paired_two import two_paired_kernel
from engine.kernels.rotated_rows import rotated_rows_kernel
from engine.kernels.twoway import twoway_kernel

_HALF = 32
_PAIRED_HALF = 128
_LANES = 8
_GRID_ROWS = 65535
"""CUDA's bound on the second and third dimension of a grid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Work of one program."""

    size: int
    """Rows of 32 values for the row kernels, columns of 32 rows for the others; a power of two, at least 32."""
    num_warps: int
    """Warps (32 or 64 threads each) of a program."""


INTERPRETER_TILE = Tile(size=256, num_warps=1)
"""The interpreter's cost is a fixed one for an operation of a program, so it gets large tiles."""

TILES: dict[str, Tile] = {
    "rows": Tile(size=128, num_warps=4),
    "rows hadamard": Tile(size=64, num_warps=2),
    "columns": Tile(size=64, num_warps=1),
    "tiles": Tile(size=64, num_warps=1),
    "twoway": Tile(size=64, num_warps=1),
    "expand_rows": Tile(size=128, num_warps=4),
    "expand_columns": Tile(size=64, num_warps=1),
    "paired rows": Tile(size=128, num_warps=4),
    "paired columns": Tile(size=64, num_warps=1),
    "paired columns hadamard": Tile(size=128, num_warps=2),
    "paired tiles": Tile(size=64, num_warps=1),
    "paired twoway": Tile(size=64, num_warps=1),
    "paired twoway hadamard": Tile(size=128, num_warps=2),
}
"""Tile of a kernel and its options, ``KERNEL [packed] [hadamard] [sr]``; fewer words stand for those with more.

``paired``: the kernels of ``engine.kernels.paired``. Chosen so that a thread holds eight neighbouring values and a warp
all 32 rows of its columns: then amax, noise and butterflies need no other warp. ``tools/bench_gpu.py --tiles``
measures the alternatives.
"""


def tile_for(kernel: str, *, packed: bool = False, hadamard: bool = False, sr: bool = False) -> Tile:
    """Return the tile of a kernel and its options from :data:`TILES`."""
    if INTERPRETED.value:
        return INTERPRETER_TILE
    words = [word for word, on in (("packed", packed), ("hadamard", hadamard), ("sr", sr)) if on]
    # The most specific entry wins, a later word before an earlier one.
    for count in range(len(words), -1, -1):
        for chosen in itertools.combinations(reversed(words), count):
            name = " ".join([kernel, *reversed(chosen)])
            if name in TILES:
                return TILES[name]
    raise KeyError(kernel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A kernel with everything it is started with."""

    kernel: Any
    """The Triton function."""
    grid: tuple[int, ...]
    """Programs, in up to three dimensions."""
    arguments: tuple[Any, ...]
    """Tensors and numbers, in the order of the kernel's parameters."""
    constants: dict[str, Any]
    """Compile-time constants."""
    num_warps: int
    """Warps of a program."""

    def run(self) -> None:
        """Start it on the device of the first tensor."""
        device = self.arguments[0].device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.kernel[self.grid](*self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        # Contracting a + b·c would skip a rounding of the definition; where the kernels want it they say fma.
        return {"num_warps": self.num_warps, "enable_fp_fusion": False}


def matrix(shape: torch.Size, axis: int, block: str) -> tuple[int, int]:
    """Return (M, K) of the matrix that the column and tile kernels see; for blocks along the last axis as well."""
    if block == "2d" or axis == len(shape) - 1:
        return math.prod(shape[:-1]), shape[-1]
    return math.prod(shape[: axis + 1]), math.prod(shape[axis + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Where an operand's random numbers and transform come from."""

    key: Tensor | None
    """int64 [1] on the operand's device, for stochastic rounding."""
    transform: DeviceHadamard | None
    """On the operand's device."""
    first: int
    """Index of the operand's first element in the logical operand."""


NO_DRAW = Draw(key=None, transform=None, first=0)
"""For operands that are rounded to nearest and not transformed."""


def _wide(draw: Draw, elements: int) -> bool:
    """Tell whether a Philox counter may exceed 31 bits."""
    return draw.first + elements >= 1 << 34


def _long(columns: int) -> bool:
    """Tell whether 32 rows exceed 2^31 values."""
    return BLOCK_SIZE * columns >= 1 << 31


def _blocks_of(elements: int, tile: Tile) -> int:
    """Return the number of programs that take ``tile.size`` rows of 32 values each."""
    return -(-(elements // BLOCK_SIZE) // tile.size)


def _columns_of(rows: int, columns: int, tile: Tile) -> int:
    """Return the number of programs that take 32 rows and ``tile.size`` columns each."""
    return rows // BLOCK_SIZE * -(-columns // tile.size)


@functools.lru_cache(maxsize=64)
def computes_on_pairs(device: torch.device) -> bool:
    """Tell whether a device's kernels work on pairs: NVIDIA GPUs from 9.0 on, and the interpreter, which tests them."""
    if device.type == "cuda" and torch.version.hip is None and not INTERPRETED.value:
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return INTERPRETED.value


def _takes_pairs(pairs: bool | None, x: Tensor, outs: tuple[Tensor, ...], operands: tuple[Operand, ...]) -> bool:
    """Tell whether a kernel on pairs serves a case; ``pairs`` None asks the device."""
    return (
        (computes_on_pairs(x.device) if pairs is None else pairs)
        and all(tensor.dtype in (torch.bfloat16, torch.uint8) and tensor.data_ptr() % 4 == 0 for tensor in (x, *outs))
        and not any(operand.clip for operand in operands)
    )


def _paired_constants(operand: Operand) -> dict[str, Any]:
    """Return the constants that every kernel on pairs takes."""
    (bits,) = struct.unpack(">H", struct.pack(">f", operand.element.top)[:2])
    return {"TOP": bits, "PTX": not INTERPRETED.value}


def _row_grid(rows: int, columns: int, tile: Tile) -> tuple[int, int, int]:
    """Return the grid of ``paired.row_block_of``."""
    blocks = rows // BLOCK_SIZE
    return -(-columns // tile.size), min(blocks, _GRID_ROWS), -(-blocks // _GRID_ROWS)


def _quantise_pairs(
    x: Tensor, operand: Operand, draw: Draw, out: Tensor, scales: Tensor | None, count: Tensor | None
) -> Launch | None:
    """Return the launch of :func:`quantise` on pairs, if a kernel serves the case."""
    transform, packed = draw.transform, scales is not None
    along_rows = operand.axis == x.ndim - 1
    one_dim = operand.block == "1d"
    rows, columns = matrix(x.shape, operand.axis, operand.block)
    if (
        (packed and operand.element is not E2M1)
        or (transform is not None and (packed or along_rows))
        or (packed and not one_dim and not along_rows)
        or columns % 2
        or (operand.sr and (columns % _LANES or draw.first % _LANES))
    ):
        return None
    kind = "tiles" if not one_dim else "rows" if along_rows else "columns"
    tile = tile_for("paired " + kind, packed=packed, hadamard=transform is not None, sr=operand.sr)
    constants = operand.constants() | _paired_constants(operand) | {"WIDE": _wide(draw, x.numel())}
    del constants["CLIP"]
    key = x if draw.key is None else draw.key
    counted = x if count is None else count
    first = draw.first // _LANES
    if kind == "rows":
        blocks = x.numel() // BLOCK_SIZE
        return Launch(
            kernel=rows_paired_kernel,
            grid=(_blocks_of(x.numel(), tile),),
            arguments=(x, out, out if scales is None else scales, counted, key, blocks, first, _PAIRED_HALF),
            constants=constants | {"R": tile.size, "PACK": packed, "FULL": blocks % tile.size == 0},
            num_warps=tile.num_warps,
        )
    constants |= {"C": tile.size, "LONG": _long(columns), "FULL": columns % tile.size == 0}
    if packed and one_dim:
        return Launch(
            kernel=down_paired_kernel,
            grid=_row_grid(rows, columns, tile),
            arguments=(x, out, scales, key, rows, columns, first, _PAIRED_HALF),
            constants=constants,
            num_warps=tile.num_warps,
        )
    stages = (x, x) if transform is None else (transform.permutation, transform.signs)
    return Launch(
        kernel=columns_paired_kernel,
        grid=_row_grid(rows, columns, tile),
        arguments=(
            *(x, out, out if scales is None else scales, counted, key),
            *(*stages, rows, columns, first, _PAIRED_HALF),
        ),
        constants=constants | _stages(transform) | {"PACK": packed, "TILED": not one_dim},
        num_warps=tile.num_warps,
    )


def _stages(transform: DeviceHadamard | None) -> dict[str, Any]:
    return {
        "STAGES": len(transform.signs) if transform else 0,
        "PERMUTED": transform is not None and transform.kind != "fixed",
    }


def quantise(
    x: Tensor,
    operand: Operand,
    draw: Draw,
    out: Tensor,
    scales: Tensor | None,
    count: Tensor | None,
    *,
    pairs: bool | None = None,
) -> Launch:
    """Quantise contiguous, non-empty x into ``out``: packed codes if ``scales`` is given, else dequantised values.

    ``count`` (int64, 0-dim) is increased by the number of non-finite blocks; only read without ``scales``. ``pairs``
    says whether the GPU computes on pairs, for tensors that are on none.
    """
    if _takes_pairs(pairs, x, (out,), (operand,)):
        on_pairs = _quantise_pairs(x, operand, draw, out, scales, count)
        if on_pairs is not None:
            return on_pairs
    transform = draw.transform
    stages = len(transform.signs) if transform else 0
    kind = "rows" if operand.block == "1d" and operand.axis == x.ndim - 1 else "columns"
    tile = tile_for(
        "tiles" if operand.block == "2d" else kind, packed=scales is not None, hadamard=stages > 0, sr=operand.sr
    )
    rows, columns = matrix(x.shape, operand.axis, operand.block)
    by_element = bool(columns % _LANES or draw.first % _LANES)
    constants = {
        **operand.constants(),
        "PACK": scales is not None,
        "WIDE": _wide(draw, x.numel()),
        "TOP_OUT": torch.finfo(out.dtype).max if out.dtype.is_floating_point else 0.0,
    }
    if kind == "columns" or stages:
        constants |= _stages(transform)
    pointers = (
        x,
        out,
        out if scales is None else scales,
        x if count is None else count,
        x if draw.key is None else draw.key,
    )
    stage_pointers = (x, x) if transform is None else (transform.permutation, transform.signs)
    first = draw.first if by_element else draw.first // _LANES
    if kind == "rows":
        blocks = x.numel() // BLOCK_SIZE
        if stages:
            constants["FULL"] = blocks % tile.size == 0
        return Launch(
            kernel=rotated_rows_kernel if stages else rows_kernel,
            grid=(_blocks_of(x.numel(), tile),),
            arguments=(*pointers, *(stage_pointers if stages else ()), blocks, first, _HALF),
            constants=constants | {"R": tile.size},
            num_warps=tile.num_warps,
        )
    constants |= {
        "C": tile.size,
        "BY_ELEMENT": by_element,
        "TILED": operand.block == "2d",
        "PACK_ROWS": operand.axis != x.ndim - 1,
        "LONG": _long(columns),
    }
    return Launch(
        kernel=columns_kernel,
        grid=(_columns_of(rows, columns, tile),),
        arguments=(*pointers, *stage_pointers, columns, first, _HALF),
        constants=constants,
        num_warps=tile.num_warps,
    )


def quantise_two(
    x: Tensor,
    rows_operand: Operand,
    columns_operand: Operand,
    draws: tuple[Draw, Draw],
    outs: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    count: Tensor,
    *,
    pairs: bool | None = None,
) -> Launch:
    """Quantise contiguous, non-empty x [M, K], multiples of 32, along K and along M in one pass.

    ``count`` is int64 [2]. The transform of ``draws[1]`` is applied along M; ``draws[0]`` must have none. ``pairs`` as
    in :func:`quantise`.
    """
    transform = draws[1].transform
    on_pairs = scales == (None, None) and _takes_pairs(pairs, x, outs, (rows_operand, columns_operand))
    tile = tile_for(
        "paired twoway" if on_pairs else "twoway",
        packed=scales[0] is not None,
        hadamard=transform is not None,
        sr=rows_operand.sr or columns_operand.sr,
    )
    rows, columns = x.shape
    stage_pointers = (x, x) if transform is None else (transform.permutation, transform.signs)
    constants = rows_operand.constants("0") | columns_operand.constants("1")
    constants["ELEMENT"] = constants.pop("ELEMENT0")
    del constants["ELEMENT1"]
    constants |= _stages(transform) | {
        "C": tile.size,
        "WIDE": _wide(draws[0], x.numel()),
        "LONG": _long(columns),
    }
    if on_pairs:
        del constants["CLIP0"], constants["CLIP1"]
        keys = [x if draw.key is None else draw.key for draw in draws]
        return Launch(
            kernel=two_paired_kernel,
            grid=_row_grid(rows, columns, tile),
            arguments=(
                *(x, outs[0], keys[0], outs[1], keys[1], count, *stage_pointers),
                *(rows, columns, draws[0].first // _LANES, _PAIRED_HALF),
            ),
            constants=constants | _paired_constants(rows_operand) | {"FULL": columns % tile.size == 0},
            num_warps=tile.num_warps,
        )
    constants |= {
        "PACK0": scales[0] is not None,
        "PACK1": scales[1] is not None,
        "TOP_OUT": max((torch.finfo(o.dtype).max for o in outs if o.dtype.is_floating_point), default=0.0),
    }
    operands = [
        (out, out if scale is None else scale, x if draw.key is None else draw.key)
        for out, scale, draw in zip(outs, scales, draws, strict=True)
    ]
    return Launch(
        kernel=twoway_kernel,
        grid=(_columns_of(rows, columns, tile),),
        arguments=(x, *operands[0], *operands[1], count, *stage_pointers, columns, draws[0].first // _LANES, _HALF),
        constants=constants,
        num_warps=tile.num_warps,
    )


def dequantise(codes: Tensor, scales: Tensor, shape: torch.Size, operand: Operand, out: Tensor) -> Launch:
    """Dequantise contiguous codes and scales into contiguous, non-empty ``out`` of the logical ``shape``."""
    constants = {name: value for name, value in operand.constants().items() if name in ("ELEMENT", "CLIP")}
    constants["TOP_OUT"] = torch.finfo(out.dtype).max
    if operand.block == "1d" and operand.axis == len(shape) - 1:
        tile = tile_for("expand_rows")
        return Launch(
            kernel=expand_rows_kernel,
            grid=(_blocks_of(out.numel(), tile),),
            arguments=(codes, scales, out, out.numel() // BLOCK_SIZE),
            constants=constants | {"R": tile.size},
            num_warps=tile.num_warps,
        )
    rows, columns = matrix(shape, operand.axis, operand.block)
    tile = tile_for("expand_columns")
    constants |= {
        "C": tile.size,
        "TILED": operand.block == "2d",
        "PACK_ROWS": operand.axis != len(shape) - 1,
        "LONG": _long(columns),
    }
    return Launch(
        kernel=expand_columns_kernel,
        grid=(_columns_of(rows, columns, tile),),
        arguments=(codes, scales, out, columns),
        constants=constants,
        num_warps=tile.num_warps,
    )
