"""Philox against big-integer arithmetic and published vectors; keys; the statistics of stochastic rounding."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from scipy import stats

from engine.formats import OperandOptions, ScaleMode, combine_keys, noise16, operand_key, philox4x32_7, qdq, step_key
from engine.formats.philox import hash64, philox4x32

# Known answers of the Random123 distribution: rounds, counter, key, output.
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
ONES = ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)
ZEROS = ((0,) * 4, (0,) * 2)
KNOWN = [
    (10, ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    (7, ZEROS, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]


def philox_reference(counter: tuple[int, ...], key: tuple[int, ...], rounds: int) -> tuple[int, ...]:
    """Philox-4x32 in Python's integers, from Salmon et al. 2011, section 3.3."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right % 2**32, (left >> 32) ^ c3 ^ k1, left % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def noise_reference(key: int, element: int) -> int:
    """The 16 bits of one element."""
    counter, lane = divmod(element, 8)
    words = philox_reference((counter % 2**32, counter >> 32, 0, 0), (key % 2**32, key >> 32), 7)
    return words[lane // 2] >> 16 if lane % 2 else words[lane // 2] & 0xFFFF


@pytest.mark.parametrize(("rounds", "arguments", "expected"), KNOWN)
def test_philox_gives_the_published_words(
    rounds: int, arguments: tuple[tuple[int, ...], tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    counter, key = arguments
    assert philox_reference(counter, key, rounds) == expected
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), (key[0], key[1]), rounds=rounds)
    assert tuple(int(word) for word in words) == expected


def test_philox_equals_big_integers_on_random_counters() -> None:
    rng = np.random.default_rng(2)
    counters = rng.integers(0, 2**32, (200, 4))
    key = tuple(int(k) for k in rng.integers(0, 2**32, 2))
    words = torch.stack(
        philox4x32_7(tuple(torch.from_numpy(counters[:, i].copy()) for i in range(4)), (key[0], key[1]))
    )
    assert words.t().tolist() == [list(philox_reference(tuple(c), key, 7)) for c in counters.tolist()]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 32), (7, 13), (0, 32)])
@pytest.mark.parametrize("row_offset", [0, 1, 5, 2**40])
@pytest.mark.parametrize("key", [0, 2**64 - 1, 0x0123456789ABCDEF])
def test_noise_is_the_documented_lane_of_the_documented_counter(
    shape: tuple[int, int], row_offset: int, key: int
) -> None:
    rows, cols = shape
    noise = noise16(key, shape, row_offset=row_offset)
    assert noise.dtype == torch.int32
    assert noise.shape == shape
    assert noise.flatten().tolist() == [noise_reference(key, row_offset * cols + i) for i in range(rows * cols)]


def test_noise_crosses_the_low_counter_word_without_a_seam() -> None:
    first = 8 * 2**32 - 16  # the counter's high word becomes 1 in the middle
    noise = noise16(77, (4, 8), row_offset=first // 8)
    assert noise.flatten().tolist() == [noise_reference(77, first + i) for i in range(32)]


def test_keys_differ_by_each_part_and_never_change() -> None:
    keys = {step_key(s, t, m) for s in range(4) for t in range(8) for m in range(4)}
    assert len(keys) == 4 * 8 * 4
    assert len({step_key(1, 23, 4), step_key(12, 3, 4), step_key(1, 2, 34)}) == 3
    assert operand_key("layers.0.wq", "dgrad_dy") != operand_key("layers.0.wq", "wgrad_dy")
    assert hash64("ab", "c") != hash64("a", "bc")


def test_keys_are_blake2b_of_a_canonical_text() -> None:
    def digest(text: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    assert step_key(0, 12, 3) == digest(b"4:step,1:0,2:12,1:3,")
    assert operand_key("layers.0.wq", "dgrad_dy") == digest(b"7:operand,11:layers.0.wq,8:dgrad_dy,")
    # Frozen: a run resumed by a later version must draw the same noise.
    assert step_key(0, 1, 0) == 6938667383495972754


def test_combine_keys_is_the_splitmix64_finaliser_of_the_sum() -> None:
    # The first outputs of splitmix64 with seed 1234567 (Vigna's reference implementation).
    state, golden = 1234567, 0x9E3779B97F4A7C15
    expected = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    for value in expected:
        assert combine_keys(state, golden) == value
        state = (state + golden) % 2**64
    assert combine_keys(2**64 - 1, 3) == combine_keys(2, 0)


def test_noise_is_uniform() -> None:
    noise = noise16(step_key(0, 1, 0), (2048, 2048))
    for bits in (noise >> 8, noise & 0xFF):
        counts = torch.bincount(bits.flatten(), minlength=256).numpy()
        assert stats.chisquare(counts).pvalue > 0.001


@pytest.mark.parametrize("mode", ["uos6", "rceil", "ceil"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stochastic_rounding_is_unbiased_without_clipping(mode: ScaleMode, dtype: torch.dtype) -> None:
    error, toward_zero = mean_errors(mode, dtype)
    assert abs(error) < 3
    assert abs(toward_zero) < 3


@pytest.mark.parametrize("mode", ["floor", "even", "uos"])
def test_the_bias_of_clipping_modes_is_seen_by_the_same_measure(mode: ScaleMode) -> None:
    _, toward_zero = mean_errors(mode, torch.float32)
    assert toward_zero < -8


def mean_errors(mode: ScaleMode, dtype: torch.dtype) -> tuple[float, float]:
    """Return the mean error and the mean growth of the magnitude over 2^22 values of N(0, 1), in standard errors."""
    x = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(11)).to(dtype)
    key = combine_keys(step_key(0, 1, 0), operand_key("layers.0.wq", "dgrad_dy"))
    values, _ = qdq(x, OperandOptions(scale_mode=mode, rounding="sr"), key=key)
    error = values.double() - x.double()
    growth = error * x.double().sign()
    return tuple(float(e.mean() / (e.std() / math.sqrt(e.numel()))) for e in (error, growth))  # type: ignore[return-value]


def largest_correlation(noise: torch.Tensor, tile: int) -> tuple[float, int]:
    """Return the largest absolute correlation over all pairs of square tiles, and the number of pairs."""
    n = noise.shape[0] // tile
    tiles = noise.double().view(n, tile, n, tile).transpose(1, 2).reshape(n * n, tile * tile).numpy()
    correlation = np.corrcoef(tiles)
    pairs = np.triu_indices(n * n, 1)
    return float(np.abs(correlation[pairs]).max()), len(pairs[0])


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_no_two_tiles_share_their_noise(tile: int) -> None:
    noise = noise16(step_key(0, 1, 0), (512, 512))
    largest, pairs = largest_correlation(noise, tile)
    # Under independence r·√n is standard normal for n = tile² values; 1 % over all pairs, two-sided (Bonferroni).
    bound = float(stats.norm.isf(0.01 / (2 * pairs))) / tile
    assert largest < bound
    repeated = noise[:tile, :tile].repeat(512 // tile, 512 // tile)
    assert largest_correlation(repeated, tile)[0] > bound


def test_two_operands_two_layers_and_two_steps_draw_unrelated_noise() -> None:
    keys = [
        combine_keys(step_key(seed, step, micro), operand_key(fqn, operand))
        for seed, step, micro in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0))
        for fqn in ("layers.0.wq", "layers.1.wq")
        for operand in ("dgrad_dy", "wgrad_dy")
    ]
    noise = np.stack([noise16(key, (64, 128)).flatten().double().numpy() for key in keys])
    correlation = np.corrcoef(noise)[np.triu_indices(len(keys), 1)]
    assert np.abs(correlation).max() < stats.norm.isf(0.01 / (2 * len(correlation))) / math.sqrt(64 * 128)
