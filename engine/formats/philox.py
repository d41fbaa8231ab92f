"""Counter-based random bits: the noise of stochastic rounding is a function of a key and the element's index.

Philox-4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3; 7 rounds is the fewest they found to pass BigCrush). Words are held in int64 tensors as 0..2^32 - 1.

The bits of element i, in row-major order of the logical, untransposed operand, rows counted in the global batch: the
16-bit lane i mod 8 of the block with counter i div 8 (64 bits: word 0 low, word 1 high; words 2 and 3 are zero). Lane
2j is the low half of output word j, lane 2j + 1 its high half. The key's low half is key word 0. So the noise depends
neither on the quantised axis, nor on tiles, chunks or the sharding of rows.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_LANES = 8
_ROUNDS = 7

if sys.byteorder != "little":
    raise ImportError("engine.formats reads 32-bit words as pairs of 16-bit lanes and needs a little-endian host")


def hash64(*parts: str | int) -> int:
    """Return 64 bits that identify the parts: blake2b, 8 bytes read as little endian, of ``len:text,`` per part.

    The length in front keeps the text unambiguous whatever the parts contain.
    """
    text = "".join(f"{len(str(part))}:{part}," for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def step_key(seed: int, step: int, micro_batch: int) -> int:
    """Return the 64-bit key of a run's seed, step and micro-batch."""
    return hash64("step", seed, step, micro_batch)


def operand_key(fqn: str, operand: str) -> int:
    """Return the 64-bit key of a layer's module path and its operand, e.g. ``("layers.0.wq", "dgrad_dy")``."""
    return hash64("operand", fqn, operand)


def combine_keys(step_key: int, operand_key: int) -> int:
    """Return the 64-bit key of one quantisation: the splitmix64 finaliser of the sum of both keys mod 2^64.

    Three shifts and two products, so that a kernel can combine a step key on the device with a layer's constant.
    """
    z = (step_key + operand_key) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], *, rounds: int) -> list[Tensor]:
    """Return the four output words of Philox-4x32 for int64 counter words of one shape, all 0..2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The products overflow int64; two's complement keeps all 64 bits, the masks drop the sign's extension.
        p0, p1 = c0 * _M0, c2 * _M1
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK32)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK32)
        c1, c3 = p1.bitwise_and_(_MASK32), p0.bitwise_and_(_MASK32)
        k0, k1 = (k0 + _W0) & _MASK32, (k1 + _W1) & _MASK32
    return [c0, c1, c2, c3]


def philox4x32_7(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Return :func:`philox4x32` with the 7 rounds that stochastic rounding uses."""
    return philox4x32(counter, key, rounds=_ROUNDS)


def noise16_flat(key: int, start: int, count: int, device: torch.device | None = None) -> Tensor:
    """Return the 16 noise bits of the elements start .. start + count - 1 under a 64-bit key.

    Returns:
        int32 [count], 0..65535, a tensor of its own.
    """
    first, last = start // _LANES, (start + count + _LANES - 1) // _LANES
    parts = [torch.empty(0, _LANES, dtype=torch.int16, device=device)]
    while first < last:  # one part, unless the counter's low word overflows in between
        high = first >> 32
        end = min(last, (high + 1) << 32)
        low = torch.arange(first & _MASK32, (first & _MASK32) + end - first, dtype=torch.int64, device=device)
        parts.append(_lanes(low, high, (key & _MASK32, key >> 32)))
        first = end
    lanes = torch.cat(parts[1:]) if len(parts) > 2 else parts[-1]
    skip = start % _LANES
    return lanes.view(-1)[skip : skip + count].to(torch.int32).bitwise_and_(0xFFFF)


def _lanes(low: Tensor, high: int, key: tuple[int, int]) -> Tensor:
    """Return the lanes (int16 bit patterns [blocks, 8]) of Philox-4x32-7 at counters with words (low, high, 0, 0).

    This is :func:`philox4x32_7` with the first two rounds simplified by what is constant: half of their products are.
    It overwrites ``low``.
    """
    keys = [((key[0] + r * _W0) & _MASK32, (key[1] + r * _W1) & _MASK32) for r in range(_ROUNDS)]
    # Round 1: c2 = c3 = 0, so the new c0 is high ^ k0 and the new c1 is 0.
    p0 = low.mul_(_M0)
    c0 = high ^ keys[0][0]
    p1 = (p0 >> 32).bitwise_xor_(keys[0][1]).bitwise_and_(_MASK32).mul_(_M1)
    # Round 2: c0 is the same in all blocks and c1 = 0.
    product = c0 * _M0
    c2 = p0.bitwise_xor_((product >> 32) ^ keys[1][1]).bitwise_and_(_MASK32)
    c3: Tensor | int = product & _MASK32
    c0_blocks = (p1 >> 32).bitwise_xor_(keys[1][0]).bitwise_and_(_MASK32)
    c1 = p1
    # c1 and c3 are only ever combined by xor, so the masks can wait until their upper halves would count.
    for k0, k1 in keys[2:]:
        p0, p1 = c0_blocks.mul_(_M0), c2.mul_(_M1)
        c0_blocks = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK32)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK32)
        c1, c3 = p1, p0
    # Narrowing keeps the low 32 bits, and a word in memory is its low half, then its high half.
    lanes = torch.empty(len(low), 4, dtype=torch.int32, device=low.device)
    for j, word in enumerate((c0_blocks, c1, c2, c3)):
        lanes[:, j] = word
    return lanes.view(torch.int16)


def noise16(
    key: int, shape: tuple[int, int], *, row_offset: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """Return the noise of the rows row_offset .. row_offset + shape[0] - 1 of a matrix with shape[1] columns.

    Returns:
        int32 of the given shape, 0..65535.
    """
    rows, cols = shape
    flat = noise16_flat(key, row_offset * cols, rows * cols, torch.device(device) if device else None)
    return flat.view(rows, cols)
