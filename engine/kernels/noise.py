"""Philox-4x32-7 on the device: the 16 noise bits of element i are lane i mod 8 of the block with counter i div 8.

See ``engine.formats.philox``, which this equals bit for bit. One call serves eight consecutive elements, so a thread
should own eight of a row. 16 bits leave a bias of at most 2^-17 of a cell, see ``engine.formats.e2m1``.
"""

from __future__ import annotations

import triton
import triton.language as tl

_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_W0 = tl.constexpr(0x9E3779B9)
_W1 = tl.constexpr(0xBB67AE85)
_MASK32 = tl.constexpr(0xFFFFFFFF)
_ROUNDS = tl.constexpr(7)


@triton.jit
def _product(a, factor: tl.constexpr):
    """Return the high and the low 32 bits of the products of uint32 values and a constant."""
    p = a.to(tl.uint64) * factor
    return (p >> 32).to(tl.uint32), p.to(tl.uint32)


@triton.jit
def load_key(key_ptr):
    """Return the low and the high half of the 64-bit key at ``key_ptr`` as uint32.

    Two loads and not one: a half cut out of a 64-bit value makes LLVM widen the rounds to 64-bit arithmetic.
    """
    halves = key_ptr.to(tl.pointer_type(tl.uint32))
    return tl.load(halves), tl.load(halves + 1)


@triton.jit
def philox(counter, key, WIDE: tl.constexpr):
    """Return the four output words (uint32) for counters: int64 if ``WIDE``, else int32, not negative."""
    k0, k1 = key
    c0 = counter.to(tl.uint32)
    c1 = (counter >> 32).to(tl.uint32) if WIDE else c0 * 0
    c2 = c0 * 0
    c3 = c2
    for i in tl.static_range(_ROUNDS):
        high0, low0 = _product(c0, _M0)
        high1, low1 = _product(c2, _M1)
        c0 = high1 ^ c1 ^ tl.add(k0, tl.full((), (i * _W0) & _MASK32, tl.uint32), sanitize_overflow=False)
        c2 = high0 ^ c3 ^ tl.add(k1, tl.full((), (i * _W1) & _MASK32, tl.uint32), sanitize_overflow=False)
        c1 = low1
        c3 = low0
    return c0, c1, c2, c3


@triton.jit
def group_words(counter, key, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr):
    """Return noise words (uint32 [ROWS, COLS / 2]) for groups of eight elements with counters [ROWS, COLS / 8].

    A word holds the bits of two neighbours, the even one's in its low half.
    """
    w0, w1, w2, w3 = philox(counter, key, WIDE)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, COLS // 2))


@triton.jit
def group_noise(counter, key, half, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr):
    """Return r << 6 | 32 (int32 [ROWS, COLS]) for groups of eight elements with counters [ROWS, COLS / 8].

    ``half`` is the number 32 as an argument of the kernel, so that the compiler cannot see it: two constants in one
    expression cost an instruction more. ``NARROW`` makes the noise pass through 16-bit integers, half as many bytes
    where it must move to other threads.
    """
    words = group_words(counter, key, ROWS, COLS, WIDE)
    if NARROW:
        halves = tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16))
        return (tl.reshape(halves, (ROWS, COLS)).to(tl.int32) << 6) | half
    shifted = tl.join((words << 6) & 0x3FFFC0, (words >> 10) & 0x3FFFC0)
    return tl.reshape(shifted, (ROWS, COLS)).to(tl.int32) | half


@triton.jit
def element_noise(index, key, half, WIDE: tl.constexpr):
    """Return r << 6 | 32 (int32) for elements with the given index: a whole call each, for rows of odd length."""
    w0, w1, w2, w3 = philox(index >> 3, key, WIDE)
    lane = (index & 7).to(tl.int32)
    word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
    bits = (word >> ((lane & 1) * 16).to(tl.uint32)) & 0xFFFF
    return (bits.to(tl.int32) << 6) | half
