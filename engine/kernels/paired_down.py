"""The kernel that quantises bfloat16 down the columns to packed codes, computing on pairs of neighbours.

The legend is that of ``engine.kernels.paired``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.paired import load_words, row_block_of, store_words, tile_words, words_at
from engine.kernels.pairs import (
    amax2,
    block_scale2,
    bytes_down,
    code_bits2,
    magnitude2,
    max_magnitude2,
    rounded2,
)


@triton.jit
def down_paired_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    key_ptr,
    rows,
    columns,
    first,
    half,
    C: tl.constexpr,
    SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    TOP: tl.constexpr,
    SR: tl.constexpr,
    WIDE: tl.constexpr,
    LONG: tl.constexpr,
    FULL: tl.constexpr,
    PTX: tl.constexpr,
):
    """Quantise blocks of 32 rows down each column of x [M, columns] to E2M1 codes, the even row in the low nibble.

    A program takes 32 rows and C columns; grid: see ``row_block_of``.
    """
    column_block, row_block = tl.program_id(0), row_block_of()
    if row_block * 32 >= rows:
        return
    words = columns // 2
    word = column_block * (C // 2) + tl.arange(0, C // 2)
    inside = (word < words)[None, :]
    pair = tl.arange(0, 16)
    row = 2 * pair
    if LONG:
        pair = pair.to(tl.int64)
    block = words_at(x_ptr) + row_block.to(tl.int64) * 32 * words
    even = load_words(block + (2 * pair[:, None] * words + word[None, :]), inside, FULL)
    odd = load_words(block + ((2 * pair + 1)[:, None] * words + word[None, :]), inside, FULL)
    top = max_magnitude2(amax2(magnitude2(even), 0, PTX), amax2(magnitude2(odd), 0, PTX), PTX)
    code, inverse, _ = block_scale2(top, SCALE[0], SCALE[1], SCALE[2], PTX)
    even_noise, odd_noise = even, odd
    if SR:
        even_noise = tile_words(key_ptr, first, row_block, row, column_block, columns, 16, C, WIDE)
        odd_noise = tile_words(key_ptr, first, row_block, row + 1, column_block, columns, 16, C, WIDE)
    inverse = inverse[None, :]
    rounded = rounded2(magnitude2(even), inverse, even_noise, half, SR, ELEMENT, TOP, PTX)
    even_bits = code_bits2(rounded, ELEMENT[1], PTX)
    rounded = rounded2(magnitude2(odd), inverse, odd_noise, half, SR, ELEMENT, TOP, PTX)
    odd_bits = code_bits2(rounded, ELEMENT[1], PTX)

    low_finite, high_finite = (top & 0xFFFF) < 0x7F80, top < 0x7F800000
    keep = tl.where(low_finite, 0xFFFF, 0) | tl.where(high_finite, -(1 << 16), 0)
    bytes_ = bytes_down(even_bits, even, odd_bits, odd, tl.broadcast_to(keep[None, :], (16, C // 2)), PTX)
    block = out_ptr.to(tl.pointer_type(tl.uint16)) + row_block.to(tl.int64) * 16 * words
    store_words(block + (pair[:, None] * words + word[None, :]), bytes_, inside, FULL)
    scales = tl.where(low_finite, (code >> 7) & 0xFF, 255) | (tl.where(high_finite, code >> 23, 255) << 8)
    to_scale = scale_ptr.to(tl.pointer_type(tl.uint16)) + row_block.to(tl.int64) * words + word
    store_words(to_scale, scales.to(tl.uint16), word < words, FULL)
