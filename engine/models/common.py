"""Building blocks shared by the decoder families. Legend: B sequences, T tokens, D width, H heads, F head size."""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A Linear that computes in its input's dtype, whatever the dtype of the master weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x·wᵀ + bias for x [..., K]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the result has the input's dtype."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rope_table(seq_len: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Return cos and sin of the rotary angles, fp32 [2, T, F/2] (Su et al. 2021), computed in fp64."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin())).float().to(device)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i+1) of x [B, T, H, F] by the angles of ``table`` [2, T, F/2], in fp32."""
    cos, sin = table[0][None, :, None, :], table[1][None, :, None, :]
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def init_weight(parameter: Tensor, *, seed: int, fqn: str, std: float) -> None:
    """Fill a parameter from a normal truncated at 3 std, drawn on the CPU from a generator keyed by (seed, fqn).

    The draw depends on nothing else, so recipes, devices and shardings start from the same bits.
    """
    digest = hashlib.blake2b(f"init|{seed}|{fqn}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    values = torch.empty(parameter.shape, dtype=torch.float32)
    nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
    with torch.no_grad():
        parameter.copy_(values)


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 (first 16 hex digits) of all parameters' names and fp32 bytes, by name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
