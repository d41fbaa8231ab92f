"""The kernel that quantises along rows behind a Hadamard transform; the legend is that of ``engine.kernels.oneway``.

A block's 32 values must meet in one thread for the butterflies, while memory wants neighbouring threads to touch
neighbouring values. So a program loads and stores its blocks with a lane for each of the 32 positions, where a
permutation costs nothing, and computes with whole blocks in each thread. Position is the first axis of its tensors
[32, R]: Triton gives the lanes to the first axis of addresses in which it sees no order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.butterflies import hadamard_rows
from engine.kernels.noise import group_noise, load_key
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
from engine.kernels.oneway import count_nonfinite, pack_rows, plain_bytes


@triton.jit
def rotated_rows_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    count_ptr,
    key_ptr,
    permutation_ptr,
    sign_ptr,
    blocks,
    first,
    half,
    R: tl.constexpr,
    SCALE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SR: tl.constexpr,
    CLIP: tl.constexpr,
    STAGES: tl.constexpr,
    PERMUTED: tl.constexpr,
    PACK: tl.constexpr,
    WIDE: tl.constexpr,
    FULL: tl.constexpr,
    TOP_OUT: tl.constexpr,
):
    """Transform and quantise x as ``blocks`` rows of 32 values; a program takes R of them. Grid: ceil(blocks / R).

    ``FULL``: blocks is a multiple of R, so that nothing is masked.
    """
    start = tl.program_id(0).to(tl.int64) * R
    left = tl.minimum(blocks - start, R).to(tl.int32)
    row = tl.arange(0, R)
    position = tl.arange(0, 32)
    position_in = position
    position_out = position
    if PERMUTED:
        position_in = tl.load(permutation_ptr + position)
        position_out = tl.load(permutation_ptr + 32 * (STAGES - 1) + position)
    inside = None if FULL else (row < left)[None, :]
    # Added in this order, so that the rows are constants in the addresses of a thread's loads.
    at = (x_ptr + start * 32 + position_in)[:, None] + (row * 32)[None, :]
    if FULL:
        x = widen(tl.load(at))
    else:
        x = widen(tl.load(at, mask=inside, other=0.0))
    x = hadamard_rows(x, permutation_ptr, sign_ptr, R, STAGES, PERMUTED)
    top = amax(x, 0)
    if not PACK:
        count_nonfinite(count_ptr, top, (R,))
    code, inverse_scale, scale = block_scale(top, SCALE[0], SCALE[1], SCALE[2])
    noise = code[None, :]
    if SR:
        group = tl.arange(0, R * 4)
        counter = (first + start * 4) + group if WIDE else (first + start * 4).to(tl.int32) + group
        natural = tl.reshape(group_noise(counter, load_key(key_ptr), half, R * 4, 8, WIDE, True), (R, 32))
        if PERMUTED:
            natural = tl.gather(natural, tl.broadcast_to(position_out[None, :], (R, 32)), axis=1)
        noise = tl.trans(natural)
    rounded = quantise_magnitude(x, inverse_scale[None, :], noise, SR, CLIP, ELEMENT)
    to = (out_ptr + start * 32 + position_out)[:, None] + (row * 32)[None, :]
    if PACK:
        tl.store(scale_ptr + start + row, scale_byte(code, top), mask=row < left)
        if ELEMENT[0] == 1:
            packed = pack_rows(rounded, x, top, position_out, SR, R, False, PERMUTED)
            byte = tl.arange(0, 16)
            tl.store(out_ptr + start * 16 + (byte[:, None] + row[None, :] * 16), packed, mask=inside)
        else:
            tl.store(to, plain_bytes(rounded, x, top[None, :], SR, ELEMENT), mask=inside)
    else:
        y = with_sign(scaled(rounded, scale[None, :], SR, CLIP, TOP_OUT), x)
        tl.store(to, narrow(y, out_ptr.dtype.element_ty), mask=inside)
