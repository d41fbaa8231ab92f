"""Hadamard transforms over 32 consecutive values, in fp32 and in a fixed order of operations.

The transform spreads an outlier over its block of 32 before quantisation. Both operands of a GEMM take the same
transform along the summed axis, where it cancels: (H·dy)ᵀ·(H·x) = dyᵀ·x.

With a permutation p, signs d and the Sylvester matrix S (entries ±1, S Sᵀ = 32):

    y[p(i)] = d[i] Σ_j S[i,j] x[p(j)] / √32

The order of operations is part of the definition, so that a kernel can equal it bit for bit: gather z[j] = x[p(j)];
butterflies (a, b) -> (a + b, a - b) over strides 1, 2, 4, 8, 16; times ±fp32(1/√32); scatter to y[p(i)].

The sums come before the factor, so inputs from about 2^123 on can overflow to Inf; quantisation counts such blocks as
non-finite, like every other.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.formats.options import BLOCK_SIZE
from engine.formats.philox import hash64, noise16_flat

_STRIDES = (1, 2, 4, 8, 16)
_SCALE = float(torch.tensor(1.0 / math.sqrt(BLOCK_SIZE), dtype=torch.float32))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """One permuted, signed Sylvester transform."""

    permutation: tuple[int, ...]
    """p: position j of the butterfly reads, and position i writes, index p(j), p(i) of the block."""
    signs: tuple[int, ...]
    """d: +1 or -1 for each output of the butterfly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hadamard:
    """An orthogonal 32x32 transform: one stage, or three for the triple, each scaled by 1/√32. See the module."""

    kind: Literal["random", "fixed", "3rht"]
    """Which transform this is; must be the one the operand's options name."""
    stages: tuple[_Stage, ...]
    """Applied first to last."""

    def apply(self, x: Tensor, axis: int = -1) -> Tensor:
        """Return H·x along ``axis``, whose size must be a multiple of 32, as a new float32 tensor of x's shape."""
        return self._along(x, axis, transpose=False)

    def apply_transpose(self, x: Tensor, axis: int = -1) -> Tensor:
        """Return Hᵀ·x along ``axis``, which undoes :meth:`apply` up to fp32 rounding (about 2.5e-7 relative)."""
        return self._along(x, axis, transpose=True)

    def matrix(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return H as a 32x32 matrix, computed in ``dtype`` without butterflies; y = H @ x for a column x."""
        result = torch.eye(BLOCK_SIZE, dtype=dtype)
        index = torch.arange(BLOCK_SIZE)
        parity = (index[:, None] & index[None, :]).to(torch.int64)
        for shift in (16, 8, 4, 2, 1):
            parity ^= parity >> shift
        sylvester = (1 - 2 * (parity & 1)).to(dtype) / math.sqrt(BLOCK_SIZE)
        for stage in self.stages:
            p = torch.tensor(stage.permutation)
            h = torch.empty(BLOCK_SIZE, BLOCK_SIZE, dtype=dtype)
            h[p[:, None], p[None, :]] = torch.tensor(stage.signs, dtype=dtype)[:, None] * sylvester
            result = h @ result
        return result

    def apply_blocks(self, x: Tensor, *, transpose: bool = False) -> Tensor:
        """Return H·x (or Hᵀ·x) along dimension 1 of x [blocks, 32, inner] as a new float32 tensor."""
        y = x.to(torch.float32)
        for stage in reversed(self.stages) if transpose else self.stages:
            y = _apply_stage(stage, y, transpose=transpose)
        return y

    def _along(self, x: Tensor, axis: int, *, transpose: bool) -> Tensor:
        axis %= x.ndim
        if x.shape[axis] % BLOCK_SIZE:
            raise ValueError(
                f"axis {axis} of shape {tuple(x.shape)} has {x.shape[axis]} values, not a multiple of {BLOCK_SIZE}: "
                f"the transform mixes {BLOCK_SIZE} consecutive values"
            )
        if x.numel() == 0:
            return x.to(torch.float32)
        if axis == x.ndim - 1:  # long inner dimension: transform the columns of the transpose
            blocks = x.reshape(-1, BLOCK_SIZE).t().unsqueeze(0)
            return self.apply_blocks(blocks, transpose=transpose).squeeze(0).t().reshape(x.shape)
        blocks = x.reshape(-1, BLOCK_SIZE, math.prod(x.shape[axis + 1 :]))
        return self.apply_blocks(blocks, transpose=transpose).view(x.shape)


@functools.lru_cache(maxsize=64)
def constants(stage: _Stage, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the permutation, its inverse, and the column of factors ±1/√32."""
    permutation = torch.tensor(stage.permutation, device=device)
    factors = torch.tensor(stage.signs, dtype=torch.float32, device=device).mul_(_SCALE).view(-1, 1)
    return permutation, torch.argsort(permutation), factors


def _apply_stage(stage: _Stage, x: Tensor, *, transpose: bool) -> Tensor:
    permutation, inverse, factors = constants(stage, x.device)
    z = x.index_select(1, permutation)
    other = torch.empty_like(z)
    if transpose:
        z.mul_(factors)
    for stride in reversed(_STRIDES) if transpose else _STRIDES:
        pairs = (z.shape[0], BLOCK_SIZE // (2 * stride), 2, stride, *z.shape[2:])
        source, target = z.view(pairs), other.view(pairs)
        torch.add(source[:, :, 0], source[:, :, 1], out=target[:, :, 0])
        torch.sub(source[:, :, 0], source[:, :, 1], out=target[:, :, 1])
        z, other = other, z
    if not transpose:
        z.mul_(factors)
    return torch.index_select(z, 1, inverse, out=other)


def make_hadamard(kind: Literal["random", "fixed", "3rht"], *, seed: int, step: int) -> Hadamard:
    """Draw the transform of a run's seed and step; equal arguments give equal transforms.

    ``fixed`` is the Sylvester matrix / √32 whatever the seed and step, ``random`` one randomised stage, ``3rht`` three
    independent ones. A stage's permutation is the stable argsort of 32 random words, its signs the lowest bits of 32
    more, from Philox under the key ``hash64("hadamard", seed, step, stage)``.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind == "fixed":
        return Hadamard(kind=kind, stages=(_Stage(permutation=tuple(range(BLOCK_SIZE)), signs=(1,) * BLOCK_SIZE),))
    if kind not in ("random", "3rht"):
        raise ValueError(f'unknown Hadamard kind {kind!r}; expected "random", "fixed" or "3rht"')
    return Hadamard(
        kind=kind,
        stages=tuple(_draw_stage(hash64("hadamard", seed, step, i)) for i in range(3 if kind == "3rht" else 1)),
    )


def _draw_stage(key: int) -> _Stage:
    halves = noise16_flat(key, 0, 4 * BLOCK_SIZE).to(torch.int64)
    words = halves[0::2] | (halves[1::2] << 16)
    permutation = torch.argsort(words[:BLOCK_SIZE], stable=True)
    signs = 1 - 2 * (words[BLOCK_SIZE:] & 1)
    return _Stage(permutation=tuple(permutation.tolist()), signs=tuple(signs.tolist()))
