"""The kernel of ``twoway`` for bfloat16 in and out, computing on pairs of neighbours.

The legend is that of ``engine.kernels.paired``; operand 0 is the row-wise one, without a Hadamard transform, operand 1
the column-wise one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.paired import (
    count_pairs,
    count_where,
    load_words,
    row_block_of,
    row_offsets,
    store_words,
    tile_words,
    transformed,
    words_at,
)
from engine.kernels.pairs import amax2, block_scale2, both2, magnitude2, mul2, rounded2, with_signs2


@triton.jit
def two_paired_kernel(
    x_ptr,
    out0_ptr,
    key0_ptr,
    out1_ptr,
    key1_ptr,
    count_ptr,
    permutation_ptr,
    sign_ptr,
    rows,
    columns,
    first,
    half,
    C: tl.constexpr,
    ELEMENT: tl.constexpr,
    TOP: tl.constexpr,
    SCALE0: tl.constexpr,
    SR0: tl.constexpr,
    SCALE1: tl.constexpr,
    SR1: tl.constexpr,
    STAGES: tl.constexpr,
    PERMUTED: tl.constexpr,
    WIDE: tl.constexpr,
    LONG: tl.constexpr,
    FULL: tl.constexpr,
    PTX: tl.constexpr,
):
    """Quantise x [M, columns], both multiples of 32, both ways; ``count`` [2] is one counter an operand.

    A program takes 32 rows and C columns; grid: see ``row_block_of``.
    """
    column_block, row_block = tl.program_id(0), row_block_of()
    if row_block * 32 >= rows:
        return
    row = tl.arange(0, 32)
    words = columns // 2
    word = column_block * (C // 2) + tl.arange(0, C // 2)
    base = row_block.to(tl.int64) * 32 * words
    inside = (word < words)[None, :]
    at = row_offsets(permutation_ptr, words, False, LONG)[:, None] + word[None, :]
    x = load_words(words_at(x_ptr) + base + at, inside, FULL)

    blocks = tl.reshape(x, (C, 16))
    magnitude = magnitude2(blocks)
    top = both2(amax2(magnitude, 1, PTX), PTX)
    first_word = (tl.arange(0, 16) == 0)[None, :]
    count_where(count_ptr, first_word & (top >= 0x7F800000)[:, None])
    _, inverse, scale = block_scale2(top, SCALE0[0], SCALE0[1], SCALE0[2], PTX)
    noise = blocks
    if SR0:
        noise = tile_words(key0_ptr, first, row_block, row, column_block, columns, 32, C, WIDE)
        noise = tl.reshape(noise, (C, 16))
    rounded = rounded2(magnitude, inverse[:, None], noise, half, SR0, ELEMENT, TOP, PTX)
    y = with_signs2(mul2(rounded, scale[:, None], PTX), blocks)
    store_words(words_at(out0_ptr) + base + at, tl.reshape(y, (32, C // 2)), inside, FULL)

    if STAGES > 0:
        # Read again, from the cache, in the order of the transform.
        word = tl.max_contiguous(word, 1)
        inside = (word < words)[:, None]
        at = row_offsets(permutation_ptr, words, PERMUTED, LONG)
        to = at
        if STAGES > 1:
            to = row_offsets(permutation_ptr + 32 * (STAGES - 1), words, PERMUTED, LONG)
        x = tl.trans(load_words((words_at(x_ptr) + base + word)[:, None] + at[None, :], inside, FULL))
        noise = x
        if SR1:
            if PERMUTED:
                row = tl.load(permutation_ptr + 32 * (STAGES - 1) + row)
            noise = tile_words(key1_ptr, first, row_block, row, column_block, columns, 32, C, WIDE)
        y = transformed(
            x,
            noise,
            half,
            count_ptr + 1,
            permutation_ptr,
            sign_ptr,
            C,
            SCALE1,
            ELEMENT,
            TOP,
            SR1,
            STAGES,
            PERMUTED,
            PTX,
        )
        store_words((words_at(out1_ptr) + base + word)[:, None] + to[None, :], tl.trans(y), inside, FULL)
    else:
        magnitude = magnitude2(x)
        top = amax2(magnitude, 0, PTX)
        count_pairs(count_ptr + 1, top)
        _, inverse, scale = block_scale2(top, SCALE1[0], SCALE1[1], SCALE1[2], PTX)
        noise = x
        if SR1:
            noise = tile_words(key1_ptr, first, row_block, row, column_block, columns, 32, C, WIDE)
        rounded = rounded2(magnitude, inverse[None, :], noise, half, SR1, ELEMENT, TOP, PTX)
        y = with_signs2(mul2(rounded, scale[None, :], PTX), x)
        store_words(words_at(out1_ptr) + base + at, y, inside, FULL)
