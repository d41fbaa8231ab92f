"""Hadamard-32 on the device, in the order of operations of ``engine.formats.hadamard``.

A stage gathers z[j] = x[p(j)], adds and subtracts over strides 1, 2, 4, 8, 16, multiplies by the signed 1/√32 and
scatters to y[p(i)]. The kernels gather the first stage and scatter the last one by addressing memory; between the
stages of the triple transform one gather does both: position j of the next stage is position inverse(p)[p'(j)] of the
last.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SCALE = tl.constexpr(0.1767766922712326)  # fp32(1/√32)


@triton.jit
def _butterfly_rows(x, COLS: tl.constexpr):
    for k in tl.static_range(5):
        pairs = tl.permute(tl.reshape(x, (16 >> k, 2, 1 << k, COLS)), (0, 2, 3, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 3, 1, 2)), (32, COLS))
    return x


@triton.jit
def per_row(pointer, COLS: tl.constexpr):
    """Return the 32 values at ``pointer`` for the rows of a tensor of COLS columns.

    Read as often as there are threads, if those hold some 64 values each: fewer reads count as cheap for Triton, and
    every thread would do all of them, and what is computed from them, instead of taking over results.
    """
    COPIES: tl.constexpr = COLS // 64 if COLS > 64 else 1
    values = tl.load(pointer + (tl.arange(0, 32 * COPIES) & 31))
    return tl.reshape(values, (COPIES, 32))


@triton.jit
def inverse(permutation):
    """Return the inverse (int32 [32]) of a permutation of 0..31."""
    i = tl.arange(0, 32)
    return tl.sum(tl.where(permutation[None, :] == i[:, None], i[None, :], 0), axis=1)


@triton.jit
def hadamard_rows(x, permutation_ptr, sign_ptr, COLS: tl.constexpr, STAGES: tl.constexpr, PERMUTED: tl.constexpr):
    """Transform fp32 x [32, COLS] along axis 0; row j of x is value p(j) of the block, in the result too.

    p is the first stage's permutation for x and the last one's for the result.
    """
    i = tl.arange(0, 32)
    for stage in tl.static_range(STAGES):
        if stage > 0 and PERMUTED:
            back = inverse(tl.load(permutation_ptr + 32 * (stage - 1) + i))
            there = tl.load(permutation_ptr + 32 * stage + i)
            source = tl.gather(back, there, axis=0)
            x = tl.gather(x, tl.broadcast_to(source[:, None], (32, COLS)), axis=0)
        factor = tl.max(per_row(sign_ptr + 32 * stage, COLS) * _SCALE, axis=0)
        x = _butterfly_rows(x, COLS) * factor[:, None]
    return x
