"""Llama-3-style decoder with torchtitan's module names.

Legend: B sequences, T tokens, D width, H heads, F head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.models.common import Linear, RMSNorm, apply_rope, init_weight, rope_table


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv = config.n_kv_heads * config.head_dim
        self.wq = Linear(config.dim, config.dim, bias=False)
        self.wk = Linear(config.dim, kv, bias=False)
        self.wv = Linear(config.dim, kv, bias=False)
        self.wo = Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, rope: Tensor) -> Tensor:
        """Return the attention output, [B, T, D]."""
        q, k, v = (proj(x_BTD).unflatten(-1, (-1, self.head_dim)) for proj in (self.wq, self.wk, self.wv))
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the feed-forward output, [B, T, D]."""
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class TransformerBlock(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x_BTD: Tensor, rope: Tensor) -> Tensor:
        """Return the block's output, [B, T, D]."""
        h = x_BTD + self.attention(self.attention_norm(x_BTD), rope)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama3(nn.Module):
    """The decoder: tokens in, logits out. Parameters are fp32; activations have ``compute_dtype``."""

    def __init__(self, config: ModelConfig, *, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        self._rope: Tensor | None = None

    def init_weights(self, seed: int) -> None:
        """Draw the initial weights: std ``init_std``, divided by sqrt(2·layers) for projections into the residual."""
        for fqn, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
                continue
            into_residual = fqn.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
            scale = 1 / math.sqrt(2 * self.config.n_layers) if into_residual else 1.0
            init_weight(parameter, seed=seed, fqn=fqn, std=self.config.init_std * scale)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return logits [B, T, vocab] in the compute dtype for token ids [B, T]."""
        if self._rope is None or self._rope.shape[1] != tokens_BT.shape[1] or self._rope.device != tokens_BT.device:
            self._rope = rope_table(tokens_BT.shape[1], self.config.head_dim, self.config.rope_theta, tokens_BT.device)
        h = self.tok_embeddings(tokens_BT).to(self.compute_dtype)
        for layer in self.layers:
            h = layer(h, self._rope)
        return self.output(self.norm(h))
