"""From a tensor and its options to a kernel launch: shapes, constants, tiles.

Every case is one matrix [M, K] for the kernels. Blocks along the last dimension: its rows of 32 values. Blocks along
another: the dimensions up to it are the rows, those behind it the columns. 32x32 tiles: all but the last dimension are
the rows. Row-major order is the same in all of them, so nothing moves, and the noise's element index stays.

Importing this module imports Triton.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.formats.options import BLOCK_SIZE
from engine.kernels.expand import expand_columns_kernel, expand_rows_kernel
from engine.kernels.hadamard import DeviceHadamard
from engine.kernels.numerics import INTERPRETED
from engine.kernels.oneway import columns_kernel, rows_kernel
from engine.kernels.operand import Operand
from engine.kernels.rotated_rows import rotated_rows_kernel
from engine.kernels.twoway import twoway_kernel

_HALF = 32
_LANES = 8


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
}
"""Tile of a kernel and its options, ``KERNEL [packed] [hadamard] [sr]``; fewer words stand for those with more.

Chosen so that a thread holds eight neighbouring values and a warp all 32 rows of its columns: then amax, noise and
butterflies need no other warp. ``tools/bench_gpu.py --tiles`` measures the alternatives.
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


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _options(tile: Tile) -> dict[str, Any]:
    # Contracting a + b·c would skip a rounding of the definition; where the kernels want it they say fma.
    return {"num_warps": tile.num_warps, "enable_fp_fusion": False}


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


def quantise(x: Tensor, operand: Operand, draw: Draw, out: Tensor, scales: Tensor | None, count: Tensor | None) -> None:
    """Quantise contiguous, non-empty x into ``out``: packed codes if ``scales`` is given, else dequantised values.

    ``count`` (int64, 0-dim) is increased by the number of non-finite blocks; only read without ``scales``.
    """
    transform = draw.transform
    along_rows = operand.block == "1d" and operand.axis == x.ndim - 1
    stages = len(transform.signs) if transform else 0
    constants = {
        **operand.constants(),
        "STAGES": stages,
        "PERMUTED": transform is not None and transform.kind != "fixed",
        "PACK": scales is not None,
        "WIDE": _wide(draw, x.numel()),
        "TOP_OUT": torch.finfo(out.dtype).max if out.dtype.is_floating_point else 0.0,
    }
    pointers = (
        x,
        out,
        out if scales is None else scales,
        x if count is None else count,
        x if draw.key is None else draw.key,
        x if transform is None else transform.permutation,
        x if transform is None else transform.signs,
    )
    with _on(x.device):
        if along_rows:
            blocks = x.numel() // BLOCK_SIZE
            tile = tile_for("rows", packed=scales is not None, hadamard=stages > 0, sr=operand.sr)
            if stages:
                kernel = rotated_rows_kernel
                constants["FULL"] = blocks % tile.size == 0
            else:
                kernel = rows_kernel
                del constants["STAGES"], constants["PERMUTED"]
                pointers = pointers[:5]
            kernel[(-(-blocks // tile.size),)](
                *pointers, blocks, draw.first // _LANES, _HALF, R=tile.size, **constants, **_options(tile)
            )
            return
        rows, columns = matrix(x.shape, operand.axis, operand.block)
        by_element = bool(columns % _LANES or draw.first % _LANES)
        kind = "tiles" if operand.block == "2d" else "columns"
        tile = tile_for(kind, packed=scales is not None, hadamard=stages > 0, sr=operand.sr)
        columns_kernel[(rows // BLOCK_SIZE * -(-columns // tile.size),)](
            *pointers,
            columns,
            draw.first if by_element else draw.first // _LANES,
            _HALF,
            C=tile.size,
            BY_ELEMENT=by_element,
            TILED=operand.block == "2d",
            PACK_ROWS=operand.axis != x.ndim - 1,
            LONG=BLOCK_SIZE * columns >= 1 << 31,
            **constants,
            **_options(tile),
        )


def quantise_two(
    x: Tensor,
    rows_operand: Operand,
    columns_operand: Operand,
    draws: tuple[Draw, Draw],
    outs: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    count: Tensor,
) -> None:
    """Quantise contiguous, non-empty x [M, K], multiples of 32, along K and along M in one pass.

    ``count`` is int64 [2]. The transform of ``draws[1]`` is applied along M; ``draws[0]`` must have none.
    """
    transform = draws[1].transform
    stages = len(transform.signs) if transform else 0
    tile = tile_for(
        "twoway", packed=scales[0] is not None, hadamard=stages > 0, sr=rows_operand.sr or columns_operand.sr
    )
    columns = x.shape[1]
    constants = rows_operand.constants("0") | columns_operand.constants("1")
    constants.pop("ELEMENT0")
    with _on(x.device):
        twoway_kernel[(len(x) // BLOCK_SIZE * -(-columns // tile.size),)](
            x,
            outs[0],
            outs[0] if scales[0] is None else scales[0],
            x if draws[0].key is None else draws[0].key,
            outs[1],
            outs[1] if scales[1] is None else scales[1],
            x if draws[1].key is None else draws[1].key,
            count,
            x if transform is None else transform.permutation,
            x if transform is None else transform.signs,
            columns,
            draws[0].first // _LANES,
            _HALF,
            C=tile.size,
            ELEMENT=constants.pop("ELEMENT1"),
            PACK0=scales[0] is not None,
            PACK1=scales[1] is not None,
            STAGES=stages,
            PERMUTED=transform is not None and transform.kind != "fixed",
            WIDE=_wide(draws[0], x.numel()),
            LONG=BLOCK_SIZE * columns >= 1 << 31,
            TOP_OUT=max((torch.finfo(o.dtype).max for o in outs if o.dtype.is_floating_point), default=0.0),
            **constants,
            **_options(tile),
        )


def dequantise(codes: Tensor, scales: Tensor, shape: torch.Size, operand: Operand, out: Tensor) -> None:
    """Dequantise contiguous codes and scales into contiguous, non-empty ``out`` of the logical ``shape``."""
    constants = operand.constants()
    constants = {
        "ELEMENT": constants["ELEMENT"],
        "CLIP": constants["CLIP"],
        "TOP_OUT": torch.finfo(out.dtype).max,
    }
    with _on(out.device):
        if operand.block == "1d" and operand.axis == len(shape) - 1:
            tile = tile_for("expand_rows")
            blocks = out.numel() // BLOCK_SIZE
            expand_rows_kernel[(-(-blocks // tile.size),)](
                codes, scales, out, blocks, R=tile.size, **constants, **_options(tile)
            )
            return
        rows, columns = matrix(shape, operand.axis, operand.block)
        tile = tile_for("expand_columns")
        expand_columns_kernel[(rows // BLOCK_SIZE * -(-columns // tile.size),)](
            codes,
            scales,
            out,
            columns,
            C=tile.size,
            TILED=operand.block == "2d",
            PACK_ROWS=operand.axis != len(shape) - 1,
            LONG=BLOCK_SIZE * columns >= 1 << 31,
            **constants,
            **_options(tile),
        )
