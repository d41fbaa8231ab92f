"""Optimizer construction and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from engine.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only; vectors (norm gains, biases) are not decayed."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of ``step`` (1-based): linear warm-up, then cosine to ``min_lr_factor`` at ``steps``."""
    warmup = round(config.warmup_fraction * steps)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    factor = config.min_lr_factor + (1 - config.min_lr_factor) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Apply a learning rate to every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
