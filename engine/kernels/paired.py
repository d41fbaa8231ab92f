"""The kernels of ``oneway`` for bfloat16 in and bfloat16 or packed out, computing on pairs of neighbours.

The legend is that of ``engine.kernels.oneway``; pointers to bfloat16 are read as pointers to words of two values, K is
even, ``TOP`` the bits (bfloat16) of the format's largest magnitude and ``PTX`` as in ``engine.kernels.pairs``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.butterflies import hadamard_rows
from engine.kernels.noise import group_words, load_key
from engine.kernels.numerics import amax, as_int, block_scale, round_nearest
from engine.kernels.oneway import count_nonfinite, spread
from engine.kernels.pairs import (
    abs2,
    amax2,
    block_scale2,
    both2,
    bytes_along,
    code_bits2,
    halves,
    magnitude2,
    min2,
    mul2,
    pair_of,
    round_stochastic2,
    rounded2,
    upper_halves,
    with_signs2,
)


@triton.jit
def words_at(pointer):
    """Return a pointer to bfloat16 as one to pairs."""
    return pointer.to(tl.pointer_type(tl.int32))


@triton.jit
def load_words(pointers, inside, FULL: tl.constexpr):
    """Load where ``inside``, else zeros; everything if ``FULL``."""
    if FULL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def store_words(pointers, values, inside, FULL: tl.constexpr):
    """Store where ``inside``; everything if ``FULL``."""
    if FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=inside)


@triton.jit
def count_where(count_ptr, bad):
    """Add the number of trues in ``bad``; costs a predicate where there are none."""
    zeros = bad.to(tl.int32) * 0
    tl.atomic_add(count_ptr + zeros, (zeros + 1).to(tl.int64), mask=bad, sem="relaxed")


@triton.jit
def rows_paired_kernel(
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
    TOP: tl.constexpr,
    SR: tl.constexpr,
    PACK: tl.constexpr,
    WIDE: tl.constexpr,
    FULL: tl.constexpr,
    PTX: tl.constexpr,
):
    """Quantise x as ``blocks`` rows of 32 values; a program takes R of them. Grid: ceil(blocks / R)."""
    start = tl.program_id(0).to(tl.int64) * R
    left = tl.minimum(blocks - start, R).to(tl.int32)
    word = tl.arange(0, R * 16)
    inside = word < left * 16
    x = tl.reshape(load_words(words_at(x_ptr) + start * 16 + word, inside, FULL), (R, 16))
    magnitude = magnitude2(x)
    top = both2(amax2(magnitude, 1, PTX), PTX)
    if not PACK:
        first_word = (tl.arange(0, 16) == 0)[None, :]
        count_where(count_ptr, first_word & (top >= 0x7F800000)[:, None])
    code, inverse, scale = block_scale2(top, SCALE[0], SCALE[1], SCALE[2], PTX)
    noise = code[:, None]
    if SR:
        group = tl.arange(0, R * 4)
        counter = (first + start * 4) + group if WIDE else (first + start * 4).to(tl.int32) + group
        noise = tl.reshape(group_words(counter, load_key(key_ptr), R * 4, 8, WIDE), (R, 16))
    rounded = rounded2(magnitude, inverse[:, None], noise, half, SR, ELEMENT, TOP, PTX)
    if PACK:
        row = tl.arange(0, R)
        finite = top < 0x7F800000
        store_words(scale_ptr + start + row, tl.where(finite, code >> 23, 255).to(tl.uint8), row < left, FULL)
        keep = tl.where(finite, -1, 0)[:, None]
        packed = bytes_along(code_bits2(rounded, ELEMENT[1], PTX), x, tl.broadcast_to(keep, (R, 16)), PTX)
        store_words(out_ptr + start * 16 + word, tl.reshape(packed, (R * 16,)), inside, FULL)
    else:
        y = with_signs2(mul2(rounded, scale[:, None], PTX), x)
        store_words(words_at(out_ptr) + start * 16 + word, tl.reshape(y, (R * 16,)), inside, FULL)


@triton.jit
def count_pairs(count_ptr, top):
    """Add the number of columns whose amax, in pairs, is Inf or NaN."""
    bad = ((top & 0xFFFF) >= 0x7F80).to(tl.int32) + (top >= 0x7F800000).to(tl.int32)
    tl.atomic_add(count_ptr + bad * 0, bad.to(tl.int64), mask=bad > 0, sem="relaxed")


@triton.jit
def tile_words(
    key_ptr,
    first,
    row_block,
    row,
    column_block,
    columns,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Return noise words (uint32 [ROWS, C / 2]) of the rows ``row`` of a block of 32 and of C columns."""
    if WIDE:
        row_block = row_block.to(tl.int64)
        row = row.to(tl.int64)
    groups = columns // 8
    counter = (first + row_block * 32 * groups + row * groups)[:, None]
    counter += (column_block * (C // 8) + tl.arange(0, C // 8))[None, :]
    return group_words(counter, load_key(key_ptr), ROWS, C, WIDE)


@triton.jit
def row_block_of():
    """Return the block of 32 rows of a program in a grid of ceil(columns / C) by row blocks.

    CUDA bounds the second dimension of a grid, so that the third one continues it.
    """
    return tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)


@triton.jit
def row_offsets(permutation_ptr, words, PERMUTED: tl.constexpr, LONG: tl.constexpr):
    """Return the offset of each of 32 rows of ``words``, in a permutation's order."""
    row = tl.arange(0, 32)
    if PERMUTED:
        row = tl.load(permutation_ptr + row)
    if LONG:
        row = row.to(tl.int64)
    return row * words


@triton.jit
def transformed(
    x,
    noise,
    half,
    count_ptr,
    permutation_ptr,
    sign_ptr,
    C: tl.constexpr,
    SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    TOP: tl.constexpr,
    SR: tl.constexpr,
    STAGES: tl.constexpr,
    PERMUTED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Return the dequantised pairs of x [32, C / 2], transformed down its columns in fp32.

    Row j of x is row p(j) of the block as in ``hadamard_rows``, and so are those of ``noise`` and of the result.
    """
    y = tl.reshape(tl.join(*halves(x)), (32, C))
    y = hadamard_rows(y, permutation_ptr, sign_ptr, C, STAGES, PERMUTED)
    top = amax(y, 0)
    count_nonfinite(count_ptr, top, (C,))
    _, inverse, scale = block_scale(top, SCALE[0], SCALE[1], SCALE[2])
    signed = y
    if SR:
        signed = y * inverse[None, :]
        a = signed
    else:
        a = round_nearest(tl.abs(y) * inverse[None, :], ELEMENT[0], ELEMENT[1])
    low, high = tl.split(tl.reshape(a, (32, C // 2, 2)))
    rounded = upper_halves(as_int(low), as_int(high), PTX)
    if SR:
        rounded = round_stochastic2(low, high, abs2(rounded, PTX), noise, half, PTX)
    else:
        rounded = min2(rounded, pair_of(TOP), PTX)
    low, high = tl.split(tl.reshape(as_int(signed), (32, C // 2, 2)))
    upper = upper_halves(low, high, PTX)
    scale_low, scale_high = tl.split(tl.reshape(as_int(scale), (C // 2, 2)))
    scale2 = upper_halves(scale_low, scale_high, PTX)
    return with_signs2(mul2(rounded, scale2[None, :], PTX), upper)


@triton.jit
def columns_paired_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    count_ptr,
    key_ptr,
    permutation_ptr,
    sign_ptr,
    rows,
    columns,
    first,
    half,
    C: tl.constexpr,
    SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    TOP: tl.constexpr,
    SR: tl.constexpr,
    STAGES: tl.constexpr,
    PERMUTED: tl.constexpr,
    PACK: tl.constexpr,
    WIDE: tl.constexpr,
    TILED: tl.constexpr,
    LONG: tl.constexpr,
    FULL: tl.constexpr,
    PTX: tl.constexpr,
):
    """Quantise blocks of 32 rows down each column, or 32x32 tiles (``TILED``), of x [M, columns].

    A program takes 32 rows and C columns; grid: see ``row_block_of``. ``PACK`` is for tiles, along the rows.
    """
    column_block, row_block = tl.program_id(0), row_block_of()
    if row_block * 32 >= rows:
        return
    row = tl.arange(0, 32)
    words = columns // 2
    word = column_block * (C // 2) + tl.arange(0, C // 2)
    base = row_block.to(tl.int64) * 32 * words
    if STAGES > 0:
        # Triton gives the lanes to the first axis of addresses in which it sees no order: so a thread takes one word of
        # each of the 32 rows, and the butterflies stay in it.
        word = tl.max_contiguous(word, 1)
        inside = (word < words)[:, None]
        at = row_offsets(permutation_ptr, words, PERMUTED, LONG)
        to = at
        if STAGES > 1:
            to = row_offsets(permutation_ptr + 32 * (STAGES - 1), words, PERMUTED, LONG)
        x = tl.trans(load_words((words_at(x_ptr) + base + word)[:, None] + at[None, :], inside, FULL))
        noise = x
        if SR:
            if PERMUTED:
                row = tl.load(permutation_ptr + 32 * (STAGES - 1) + row)
            noise = tile_words(key_ptr, first, row_block, row, column_block, columns, 32, C, WIDE)
        y = transformed(
            x,
            noise,
            half,
            count_ptr,
            permutation_ptr,
            sign_ptr,
            C,
            SCALE,
            ELEMENT,
            TOP,
            SR,
            STAGES,
            PERMUTED,
            PTX,
        )
        store_words((words_at(out_ptr) + base + word)[:, None] + to[None, :], tl.trans(y), inside, FULL)
    else:
        inside = (word < words)[None, :]
        at = row_offsets(permutation_ptr, words, False, LONG)[:, None] + word[None, :]
        x = load_words(words_at(x_ptr) + base + at, inside, FULL)
        noise = x
        if SR:
            noise = tile_words(key_ptr, first, row_block, row, column_block, columns, 32, C, WIDE)
        magnitude = magnitude2(x)
        top = amax2(magnitude, 0, PTX)
        if TILED:
            top = both2(amax2(tl.reshape(top, (C // 32, 16)), 1, PTX), PTX)
        if not PACK:
            if TILED:
                count_where(count_ptr, top >= 0x7F800000)
            else:
                count_pairs(count_ptr, top)
        code, inverse, scale = block_scale2(top, SCALE[0], SCALE[1], SCALE[2], PTX)
        if TILED:
            inverse = spread(inverse, C // 2, 16)
            scale = spread(scale, C // 2, 16)
        rounded = rounded2(magnitude, inverse[None, :], noise, half, SR, ELEMENT, TOP, PTX)
        if PACK:
            finite = top < 0x7F800000
            block = column_block * (C // 32) + tl.arange(0, C // 32)
            of_row = row_block.to(tl.int64) * (columns // 32)
            bytes_ = tl.where(finite, code >> 23, 255).to(tl.uint8)
            tl.store(scale_ptr + of_row + block, bytes_, mask=block < columns // 32)
            keep = spread(tl.where(finite, -1, 0), C // 2, 16)
            keep = tl.broadcast_to(keep[None, :], (32, C // 2))
            packed = bytes_along(code_bits2(rounded, ELEMENT[1], PTX), x, keep, PTX)
            store_words(out_ptr + base + at, packed, inside, FULL)
        else:
            y = with_signs2(mul2(rounded, scale[None, :], PTX), x)
            store_words(words_at(out_ptr) + base + at, y, inside, FULL)
