"""Kernels that dequantise packed codes and E8M0 scales; the legend is that of ``engine.kernels.oneway``."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.numerics import descaled, element_value, narrow, scale_value
from engine.kernels.oneway import spread


@triton.jit
def expand_rows_kernel(
    code_ptr,
    scale_ptr,
    out_ptr,
    blocks,
    R: tl.constexpr,
    ELEMENT: tl.constexpr,
    CLIP: tl.constexpr,
    TOP_OUT: tl.constexpr,
):
    """Dequantise ``blocks`` rows of 32 values packed along the row; a program takes R. Grid: ceil(blocks / R)."""
    start = tl.program_id(0).to(tl.int64) * R
    left = tl.minimum(blocks - start, R).to(tl.int32)
    row = tl.arange(0, R)
    scale = scale_value(tl.load(scale_ptr + start + row, mask=row < left, other=0).to(tl.int32))
    PER_BLOCK: tl.constexpr = 16 if ELEMENT[0] == 1 else 32
    # As many as give a thread eight values: wider loads would need an exchange between threads.
    byte = tl.max_contiguous(tl.arange(0, R * PER_BLOCK), PER_BLOCK // 4)
    codes = tl.load(code_ptr + start * PER_BLOCK + byte, mask=byte < left * PER_BLOCK, other=0).to(tl.int32)
    if ELEMENT[0] == 1:
        codes = tl.join(codes & 15, codes >> 4)
    value = element_value(tl.reshape(codes, (R, 32)), ELEMENT[0], ELEMENT[1], ELEMENT[3])
    value = narrow(descaled(value, scale[:, None], CLIP, TOP_OUT), out_ptr.dtype.element_ty)
    element = tl.arange(0, R * 32)
    tl.store(out_ptr + start * 32 + element, tl.reshape(value, (R * 32,)), mask=element < left * 32)


@triton.jit
def expand_columns_kernel(
    code_ptr,
    scale_ptr,
    out_ptr,
    columns,
    C: tl.constexpr,
    ELEMENT: tl.constexpr,
    CLIP: tl.constexpr,
    TILED: tl.constexpr,
    PACK_ROWS: tl.constexpr,
    LONG: tl.constexpr,
    TOP_OUT: tl.constexpr,
):
    """Dequantise blocks down the columns, or 32x32 tiles, to [M, columns]. Grid: M / 32 * ceil(columns / C)."""
    tiles = tl.cdiv(columns, C)
    row_block = (tl.program_id(0) // tiles).to(tl.int64)
    column_block = tl.program_id(0) % tiles
    column = column_block * C + tl.arange(0, C)
    if TILED:
        block = column_block * (C // 32) + tl.arange(0, C // 32)
        bytes_ = tl.load(scale_ptr + row_block * (columns // 32) + block, mask=block < columns // 32, other=0)
        scale = spread(scale_value(bytes_.to(tl.int32)), C, 32)
    else:
        bytes_ = tl.load(scale_ptr + row_block * columns + column, mask=column < columns, other=0)
        scale = scale_value(bytes_.to(tl.int32))
    inside = (column < columns)[None, :]
    base = row_block * 32 * columns
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    ROWS: tl.constexpr = 16 if PACK_ROWS and ELEMENT[0] == 1 else 32
    row = tl.arange(0, ROWS)
    if LONG:
        row = row.to(tl.int64)
    if ELEMENT[0] == 1 and not PACK_ROWS:
        byte = column_block * (C // 2) + tl.arange(0, C // 2)
        at = base // 2 + (row[:, None] * (columns // 2) + byte[None, :])
        pairs = tl.load(code_ptr + at, mask=(byte < columns // 2)[None, :], other=0).to(tl.int32)
        codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (32, C))
    else:
        at = base * ROWS // 32 + (row[:, None] * columns + column[None, :])
        codes = tl.load(code_ptr + at, mask=inside, other=0).to(tl.int32)
    if ROWS == 16:
        for odd in tl.static_range(2):
            value = element_value((codes >> (4 * odd)) & 15, ELEMENT[0], ELEMENT[1], ELEMENT[3])
            value = narrow(descaled(value, scale[None, :], CLIP, TOP_OUT), dtype)
            to = base + ((2 * row + odd)[:, None] * columns + column[None, :])
            tl.store(out_ptr + to, value, mask=inside)
    else:
        value = element_value(codes, ELEMENT[0], ELEMENT[1], ELEMENT[3])
        value = narrow(descaled(value, scale[None, :], CLIP, TOP_OUT), dtype)
        tl.store(out_ptr + base + (row[:, None] * columns + column[None, :]), value, mask=inside)
