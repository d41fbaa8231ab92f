"""One kernel that reads x once and quantises it along its rows and down its columns.

A training step needs the gradient dy twice: along N for dgrad and, transformed and rounded anew, along M for wgrad; and
x along K for fprop and along M for wgrad. The legend is that of ``engine.kernels.oneway``; operand 0 is the row-wise
one, without a Hadamard transform, operand 1 the column-wise one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.butterflies import hadamard_rows
from engine.kernels.numerics import (
    amax,
    block_scale,
    narrow,
    quantise_magnitude,
    scale_byte,
    scaled,
    widen,
    with_sign,
)
from engine.kernels.oneway import count_nonfinite, pack_last, pack_rows, pair_order, plain_bytes, tile_noise


@triton.jit
def twoway_kernel(
    x_ptr,
    out0_ptr,
    scale0_ptr,
    key0_ptr,
    out1_ptr,
    scale1_ptr,
    key1_ptr,
    count_ptr,
    permutation_ptr,
    sign_ptr,
    columns,
    first,
    half,
    C: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE0: tl.constexpr,
    SR0: tl.constexpr,
    CLIP0: tl.constexpr,
    PACK0: tl.constexpr,
    SCALE1: tl.constexpr,
    SR1: tl.constexpr,
    CLIP1: tl.constexpr,
    PACK1: tl.constexpr,
    STAGES: tl.constexpr,
    PERMUTED: tl.constexpr,
    WIDE: tl.constexpr,
    LONG: tl.constexpr,
    TOP_OUT: tl.constexpr,
):
    """Quantise x [M, columns], both multiples of 32, both ways; ``count`` [2] is one counter an operand.

    A program takes 32 rows and C columns. Grid: M / 32 * ceil(columns / C).
    """
    tiles = tl.cdiv(columns, C)
    row_block = tl.program_id(0) // tiles
    column_block = tl.program_id(0) % tiles
    i = tl.arange(0, 32)
    PAIR_ORDER: tl.constexpr = PACK1 and STAGES == 0 and ELEMENT[0] == 1
    row_in = i
    row_out = i
    if PAIR_ORDER:
        row_in = pair_order(i)
        row_out = row_in
    if PERMUTED:
        row_in = tl.load(permutation_ptr + i)
        row_out = tl.load(permutation_ptr + 32 * (STAGES - 1) + i)
    column = column_block * C + tl.arange(0, C)
    inside = (column < columns)[None, :]
    base = row_block.to(tl.int64) * 32 * columns
    long_in = row_in
    long_out = row_out
    if LONG:
        long_in = row_in.to(tl.int64)
        long_out = row_out.to(tl.int64)
    at = base + (long_in[:, None] * columns + column[None, :])
    x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))

    blocks = tl.reshape(x, (32 * (C // 32), 32))
    top = amax(blocks, 1)
    if not PACK0:
        count_nonfinite(count_ptr, top, (32 * (C // 32),))
    code, inverse_scale, scale = block_scale(top, SCALE0[0], SCALE0[1], SCALE0[2])
    noise = code[:, None]
    if SR0:
        noise = tile_noise(key0_ptr, first, row_block, row_in, column_block, columns, half, C, WIDE, False, False)
        noise = tl.reshape(noise, (32 * (C // 32), 32))
    rounded = quantise_magnitude(blocks, inverse_scale[:, None], noise, SR0, CLIP0, ELEMENT)
    if PACK0:
        block = column_block * (C // 32) + tl.arange(0, C // 32)
        to = row_block.to(tl.int64) * (columns // 32) * 32 + (long_in[:, None] * (columns // 32) + block[None, :])
        bytes_ = tl.reshape(scale_byte(code, top), (32, C // 32))
        tl.store(scale0_ptr + to, bytes_, mask=(block < columns // 32)[None, :])
        if ELEMENT[0] == 1:
            byte = column_block * (C // 2) + tl.arange(0, C // 2)
            to = base // 2 + (long_in[:, None] * (columns // 2) + byte[None, :])
            packed = tl.reshape(pack_last(rounded, blocks, top[:, None], SR0, C, 32), (32, C // 2))
            tl.store(out0_ptr + to, packed, mask=(byte < columns // 2)[None, :])
        else:
            plain = plain_bytes(rounded, blocks, top[:, None], SR0, ELEMENT)
            tl.store(out0_ptr + at, tl.reshape(plain, (32, C)), mask=inside)
    else:
        y = with_sign(scaled(rounded, scale[:, None], SR0, CLIP0, TOP_OUT), blocks)
        tl.store(out0_ptr + at, tl.reshape(narrow(y, out0_ptr.dtype.element_ty), (32, C)), mask=inside)

    if STAGES > 0:
        x = hadamard_rows(x, permutation_ptr, sign_ptr, C, STAGES, PERMUTED)
    top = amax(x, 0)
    if not PACK1:
        count_nonfinite(count_ptr + 1, top, (C,))
    code, inverse_scale, scale = block_scale(top, SCALE1[0], SCALE1[1], SCALE1[2])
    noise = code[None, :]
    if SR1:
        noise = tile_noise(key1_ptr, first, row_block, row_out, column_block, columns, half, C, WIDE, False, STAGES > 0)
    rounded = quantise_magnitude(x, inverse_scale[None, :], noise, SR1, CLIP1, ELEMENT)
    to = base + (long_out[:, None] * columns + column[None, :])
    if PACK1:
        of_row = row_block.to(tl.int64) * columns
        tl.store(scale1_ptr + of_row + column, scale_byte(code, top), mask=column < columns)
        if ELEMENT[0] == 1:
            packed = pack_rows(rounded, x, top, row_out, SR1, C, PAIR_ORDER, PERMUTED)
            pair = tl.arange(0, 16)
            if LONG:
                pair = pair.to(tl.int64)
            to_pair = row_block.to(tl.int64) * 16 * columns + (pair[:, None] * columns + column[None, :])
            tl.store(out1_ptr + to_pair, packed, mask=inside)
        else:
            tl.store(out1_ptr + to, plain_bytes(rounded, x, top[None, :], SR1, ELEMENT), mask=inside)
    else:
        y = with_sign(scaled(rounded, scale[None, :], SR1, CLIP1, TOP_OUT), x)
        tl.store(out1_ptr + to, narrow(y, out1_ptr.dtype.element_ty), mask=inside)
