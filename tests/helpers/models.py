"""A tiny model and a loss on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import ModelConfig, from_dict, resolve_model

NANO = from_dict(
    ModelConfig,
    resolve_model(
        {
            "name": "llama3_nano",
            "dim": 32,
            "n_layers": 2,
            "n_heads": 2,
            "n_kv_heads": 2,
            "ffn_dim": 64,
            "vocab_size": 64,
        }
    ),
)


def tiny_loss(model: nn.Module, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (2, 33), generator=generator)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
