"""Model shapes by name, as data. Torch-free, so that ``lptctl`` can validate a sweep and count parameters.

A sweep names a preset (``model: llama3_nano``) and may override fields (``model: {name: llama3_nano, n_layers: 2}``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.strict import ConfigError, Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a Llama-3-style decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

    name: str
    """Preset the shape started from."""
    family: Literal["llama3"]
    """Architecture; picks the model class."""
    dim: int
    """Width of the residual stream, features."""
    n_layers: int
    """Number of transformer blocks."""
    n_heads: int
    """Number of query heads."""
    n_kv_heads: int
    """Number of key and value heads."""
    ffn_dim: int
    """Hidden width of the SwiGLU feed-forward, features."""
    vocab_size: int
    """Rows of the embedding; at least the tokeniser's vocabulary."""
    rope_theta: float = 500_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    tied: bool = False
    """Share the embedding with the output projection."""
    init_std: float = 0.02
    """Standard deviation of the truncated-normal initial weights."""

    def __post_init__(self) -> None:
        problems = [
            Problem(path=(name,), message=f"{getattr(self, name)} must be at least 1")
            for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
            if getattr(self, name) < 1
        ]
        if not problems:
            if self.dim % self.n_heads:
                problems.append(Problem(path=("n_heads",), message=f"{self.n_heads} does not divide dim {self.dim}"))
            elif (self.dim // self.n_heads) % 2:
                problems.append(
                    Problem(
                        path=("n_heads",), message=f"head size {self.dim // self.n_heads} is odd; rotary needs pairs"
                    )
                )
            if self.n_heads % self.n_kv_heads:
                problems.append(
                    Problem(path=("n_kv_heads",), message=f"{self.n_kv_heads} does not divide n_heads {self.n_heads}")
                )
        if problems:
            raise ConfigError(problems)

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.dim // self.n_heads

    def num_parameters(self) -> int:
        """Count the parameters, embeddings included."""
        kv = self.n_kv_heads * self.head_dim
        block = 2 * self.dim * self.dim + 2 * self.dim * kv + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied else 2)
        return self.n_layers * block + self.dim + embeddings

    def flops_per_token(self, seq_len: int) -> float:
        """Count training FLOPs a token: 6 per matmul parameter plus 12·layers·dim·seq_len for attention.

        The input embedding is a gather and is not counted; the formula is torchtitan's (PaLM, appendix B), which counts
        the whole attention square although the mask is causal.
        """
        matmul = self.num_parameters() - (0 if self.tied else self.vocab_size * self.dim)
        return 6.0 * matmul + 12.0 * self.n_layers * self.dim * seq_len


MODELS: dict[str, ModelConfig] = {
    m.name: m
    for m in (
        ModelConfig(
            name="llama3_nano",
            family="llama3",
            dim=128,
            n_layers=4,
            n_heads=4,
            n_kv_heads=4,
            ffn_dim=384,
            vocab_size=256,
        ),
        ModelConfig(
            name="llama3_debugmodel",
            family="llama3",
            dim=256,
            n_layers=6,
            n_heads=16,
            n_kv_heads=16,
            ffn_dim=768,
            vocab_size=2048,
        ),
    )
}
