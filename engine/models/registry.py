"""Which class builds which model family."""

from __future__ import annotations

import torch
from torch import nn

from engine.config import ModelConfig
from engine.models.llama3 import Llama3

FAMILIES: dict[str, type[Llama3]] = {"llama3": Llama3}
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(config: ModelConfig, *, compute_dtype: str, seed: int, device: torch.device) -> nn.Module:
    """Build a model on ``device`` with the initial weights of ``seed``."""
    model = FAMILIES[config.family](config, compute_dtype=COMPUTE_DTYPES[compute_dtype])
    model.init_weights(seed)
    return model.to(device)
