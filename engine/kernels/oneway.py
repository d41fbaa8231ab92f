"""Kernels that quantise a matrix in one orientation: blocks along its rows, down its columns, or 32x32 tiles.

Legend: x [M, K] row-major, M rows of K values; a program holds R rows and C columns of it. Each reads x once and writes
one result, dequantised values (``PACK`` off) or packed codes and scales.

What the arguments mean in every kernel: ``count`` is a counter of non-finite blocks (int64, added to); ``key`` the
64-bit noise key; ``first`` the index of x's first element (``by_element``) or of its first group of eight elements
in the logical operand; ``half`` the number 32, see ``engine.kernels.noise``; ``permutation`` and ``sign`` the stages of
a Hadamard transform, int32 and fp32 [STAGES, 32]. ``SCALE`` is (BUMP, EMAX, LIMIT) of ``block_scale``; ``ELEMENT``
(MBITS, EMIN, TOP, EBITS) of the format; ``TOP_OUT`` the largest finite value of the output's dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.butterflies import hadamard_rows, inverse
from engine.kernels.noise import element_noise, group_noise, load_key
from engine.kernels.numerics import (
    amax,
    as_float,
    as_int,
    block_scale,
    element_byte,
    magnitude_bits,
    narrow,
    pair_byte,
    quantise_magnitude,
    scale_byte,
    scaled,
    widen,
    with_sign,
)


@triton.jit
def count_nonfinite(count_ptr, top, SHAPE: tl.constexpr):
    """Add the number of blocks whose amax ``top`` is Inf or NaN; costs a predicate where there are none."""
    bad = as_int(top) >= 0x7F800000
    zeros = tl.zeros(SHAPE, tl.int32)
    tl.atomic_add(count_ptr + zeros, (zeros + 1).to(tl.int64), mask=bad, sem="relaxed")


@triton.jit
def pack_last(rounded, x, top, SR: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Return uint8 [R, C / 2] of E2M1 values [R, C]: the even column is the low nibble. ``top``: amax of each byte."""
    bits = magnitude_bits(rounded, SR, 0)
    low, high = tl.split(tl.reshape(bits, (R, C // 2, 2)))
    low_x, high_x = tl.split(tl.reshape(x, (R, C // 2, 2)))
    byte = pair_byte(low, low_x, high, high_x)
    return tl.where(as_int(top) >= 0x7F800000, 0, byte).to(tl.uint8)


@triton.jit
def plain_bytes(rounded, x, top, SR: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the bytes (uint8) of 8-bit elements, 0 in non-finite blocks."""
    byte = element_byte(magnitude_bits(rounded, SR, ELEMENT[1]), x, ELEMENT[0])
    return tl.where(as_int(top) >= 0x7F800000, 0, byte).to(tl.uint8)


@triton.jit
def rows_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    count_ptr,
    key_ptr,
    blocks,
    first,
    half,
    R: tl.constexpr,
    SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SR: tl.constexpr,
    CLIP: tl.constexpr,
    PACK: tl.constexpr,
    WIDE: tl.constexpr,
    TOP_OUT: tl.constexpr,
):
    """Quantise x as ``blocks`` rows of 32 values; a program takes R of them. Grid: ceil(blocks / R)."""
    start = tl.program_id(0).to(tl.int64) * R
    left = tl.minimum(blocks - start, R).to(tl.int32)
    element = tl.arange(0, R * 32)
    inside = element < left * 32
    flat = tl.load(x_ptr + start * 32 + element, mask=inside, other=0.0)
    x = widen(tl.reshape(flat, (R, 32)))
    top = amax(x, 1)
    if not PACK:
        count_nonfinite(count_ptr, top, (R,))
    code, inverse_scale, scale = block_scale(top, SCALE[0], SCALE[1], SCALE[2])
    noise = code[:, None]
    if SR:
        group = tl.arange(0, R * 4)
        counter = (first + start * 4) + group if WIDE else (first + start * 4).to(tl.int32) + group
        noise = tl.reshape(group_noise(counter, load_key(key_ptr), half, R * 4, 8, WIDE, False), (R, 32))
    rounded = quantise_magnitude(x, inverse_scale[:, None], noise, SR, CLIP, ELEMENT)
    if PACK:
        row = tl.arange(0, R)
        tl.store(scale_ptr + start + row, scale_byte(code, top), mask=row < left)
        if ELEMENT[0] == 1:
            # Four bytes a thread, the codes of its eight values: wider stores would need an exchange between threads.
            byte = tl.max_contiguous(tl.arange(0, R * 16), 4)
            packed = tl.reshape(pack_last(rounded, x, top[:, None], SR, R, 32), (R * 16,))
            tl.store(out_ptr + start * 16 + byte, packed, mask=byte < left * 16)
        else:
            plain = plain_bytes(rounded, x, top[:, None], SR, ELEMENT)
            tl.store(out_ptr + start * 32 + element, tl.reshape(plain, (R * 32,)), mask=inside)
    else:
        y = with_sign(scaled(rounded, scale[:, None], SR, CLIP, TOP_OUT), x)
        tl.store(
            out_ptr + start * 32 + element,
            tl.reshape(narrow(y, out_ptr.dtype.element_ty), (R * 32,)),
            mask=inside,
        )


@triton.jit
def pair_order(i):
    """Return row numbers of 32 such that rows 2k and 2k + 1 sit at k and k + 16."""
    return ((i & 15) << 1) | (i >> 4)


@triton.jit
def _even_and_odd(rows, C: tl.constexpr, PAIR_ORDER: tl.constexpr):
    """Return the even and the odd rows [16, C] of values [32, C] in ``pair_order`` or in order."""
    if PAIR_ORDER:
        pairs = tl.permute(tl.reshape(rows, (2, 16, C)), (1, 2, 0))
    else:
        pairs = tl.permute(tl.reshape(rows, (16, 2, C)), (0, 2, 1))
    return tl.split(pairs)


@triton.jit
def pack_rows(
    rounded, x, top, row_out, SR: tl.constexpr, C: tl.constexpr, PAIR_ORDER: tl.constexpr, PERMUTED: tl.constexpr
):
    """Return uint8 [16, C] of E2M1 values [32, C]: the even row is the low nibble. ``top``: amax of each column.

    Row j holds row ``row_out``(j) if ``PERMUTED``; else the rows are in ``pair_order`` or in order.
    """
    bits = magnitude_bits(rounded, SR, 0)
    if PERMUTED:
        source = tl.broadcast_to(inverse(row_out)[:, None], (32, C))
        signed = tl.gather(as_int(with_sign(as_float(bits), x)), source, axis=0)
        bits = signed & 0x7FFFFFFF
        x = as_float(signed)
    low, high = _even_and_odd(bits, C, PAIR_ORDER)
    low_x, high_x = _even_and_odd(x, C, PAIR_ORDER)
    byte = pair_byte(low, low_x, high, high_x)
    return tl.where(as_int(top)[None, :] >= 0x7F800000, 0, byte).to(tl.uint8)


@triton.jit
def tile_noise(
    key_ptr,
    first,
    row_block,
    row,
    column_block,
    columns,
    half,
    C: tl.constexpr,
    WIDE: tl.constexpr,
    BY_ELEMENT: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Return the noise (int32 [32, C]) of a block of 32 rows, ``row`` of which is a permutation, and C columns."""
    if WIDE:
        row_block = row_block.to(tl.int64)
        row = row.to(tl.int64)
    if BY_ELEMENT:
        index = (first + row_block * 32 * columns + row * columns)[:, None]
        index += (column_block * C + tl.arange(0, C))[None, :]
        return element_noise(index, load_key(key_ptr), half, WIDE)
    groups = columns // 8
    counter = (first + row_block * 32 * groups + row * groups)[:, None]
    counter += (column_block * (C // 8) + tl.arange(0, C // 8))[None, :]
    return group_noise(counter, load_key(key_ptr), half, 32, C, WIDE, NARROW)


@triton.jit
def columns_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    count_ptr,
    key_ptr,
    permutation_ptr,
    sign_ptr,
    columns,
    first,
    half,
    C: tl.constexpr,
    SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SR: tl.constexpr,
    CLIP: tl.constexpr,
    STAGES: tl.constexpr,
    PERMUTED: tl.constexpr,
    PACK: tl.constexpr,
    WIDE: tl.constexpr,
    BY_ELEMENT: tl.constexpr,
    TILED: tl.constexpr,
    PACK_ROWS: tl.constexpr,
    LONG: tl.constexpr,
    TOP_OUT: tl.constexpr,
):
    """Quantise blocks of 32 rows down each column, or 32x32 tiles (``TILED``), of x [M, columns].

    A program takes 32 rows and C columns; grid: M / 32 * ceil(columns / C). Rows may come in any order, so the
    permutations at the ends of a Hadamard transform are addresses. ``PACK_ROWS`` packs codes down the columns;
    ``LONG`` is set where 32 rows exceed 2^31 values.
    """
    tiles = tl.cdiv(columns, C)
    row_block = tl.program_id(0) // tiles
    column_block = tl.program_id(0) % tiles
    i = tl.arange(0, 32)
    PAIR_ORDER: tl.constexpr = PACK and PACK_ROWS and STAGES == 0 and ELEMENT[0] == 1
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
    if LONG:
        row_in = row_in.to(tl.int64)
        row_out = row_out.to(tl.int64)
    x = widen(tl.load(x_ptr + base + (row_in[:, None] * columns + column[None, :]), mask=inside, other=0.0))
    if STAGES > 0:
        x = hadamard_rows(x, permutation_ptr, sign_ptr, C, STAGES, PERMUTED)
    top = amax(x, 0)
    if TILED:
        top = amax(tl.reshape(top, (C // 32, 32)), 1)
    if not PACK:
        count_nonfinite(count_ptr, top, (C // 32 if TILED else C,))
    code, inverse_scale, scale = block_scale(top, SCALE[0], SCALE[1], SCALE[2])
    row_top = top
    if TILED:
        row_top = spread(top, C, 32)
        inverse_scale = spread(inverse_scale, C, 32)
        scale = spread(scale, C, 32)
    noise = row_top[None, :]
    if SR:
        noise = tile_noise(
            key_ptr, first, row_block, row_out, column_block, columns, half, C, WIDE, BY_ELEMENT, STAGES > 0
        )
    rounded = quantise_magnitude(x, inverse_scale[None, :], noise, SR, CLIP, ELEMENT)
    if PACK:
        if TILED:
            block = column_block * (C // 32) + tl.arange(0, C // 32)
            of_row = row_block.to(tl.int64) * (columns // 32)
            tl.store(scale_ptr + of_row + block, scale_byte(code, top), mask=block < columns // 32)
        else:
            of_row = row_block.to(tl.int64) * columns
            tl.store(scale_ptr + of_row + column, scale_byte(code, top), mask=column < columns)
        if ELEMENT[0] != 1:
            plain = plain_bytes(rounded, x, row_top[None, :], SR, ELEMENT)
            tl.store(out_ptr + base + (row_out[:, None] * columns + column[None, :]), plain, mask=inside)
        elif PACK_ROWS:
            packed = pack_rows(rounded, x, row_top, row_out.to(tl.int32), SR, C, PAIR_ORDER, PERMUTED)
            pair = tl.arange(0, 16)
            if LONG:
                pair = pair.to(tl.int64)
            to = row_block.to(tl.int64) * 16 * columns + (pair[:, None] * columns + column[None, :])
            tl.store(out_ptr + to, packed, mask=inside)
        else:
            byte = column_block * (C // 2) + tl.arange(0, C // 2)
            to = base // 2 + (row_out[:, None] * (columns // 2) + byte[None, :])
            packed = pack_last(rounded, x, spread(top, C // 2, 16)[None, :], SR, 32, C)
            tl.store(out_ptr + to, packed, mask=(byte < columns // 2)[None, :])
    else:
        y = with_sign(scaled(rounded, scale[None, :], SR, CLIP, TOP_OUT), x)
        tl.store(
            out_ptr + base + (row_out[:, None] * columns + column[None, :]),
            narrow(y, out_ptr.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def spread(per_block, C: tl.constexpr, TIMES: tl.constexpr):
    """Repeat values [C / TIMES] TIMES times each, to [C]."""
    return tl.reshape(tl.broadcast_to(per_block[:, None], (C // TIMES, TIMES)), (C,))
