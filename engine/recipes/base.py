"""A recipe at work: the hooks through which it reaches the trainer.

The trainer calls ``on_convert`` once, ``pre_micro_batch`` before each forward, and ``stats`` when it logs. Recipes with
state of their own extend this class and return it from ``state_dict``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from engine.config import RunConfig
from engine.lowp.convert import Conversion, convert
from engine.lowp.linear import LowpOptions


class Recipe:
    """The switches of a run applied to a model."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config.recipe
        self.seed = config.seed
        self.options = LowpOptions(save_packed=config.runtime.save_packed, gemm=config.runtime.gemm)
        self.conversion: Conversion | None = None

    def on_convert(self, model: nn.Module) -> None:
        """Swap layers in place, before the optimizer is built.

        Raises:
            ConfigError: if the recipe does not fit the model.
        """
        if self.config.switches.elem_format != "none":
            self.conversion = convert(model, self.config, options=self.options)

    @property
    def quantised_layers(self) -> tuple[str, ...]:
        """Module paths of the swapped layers."""
        return self.conversion.layers if self.conversion else ()

    def pre_micro_batch(self, step: int, micro_batch: int) -> None:
        """Set the random keys and the Hadamard draw of a micro-batch (step 1-based)."""
        if self.conversion is not None:
            self.conversion.state.set_step(self.seed, step, micro_batch)

    def take_nonfinite_blocks(self) -> int | None:
        """Return the number of non-finite blocks since the last call; None when nothing is quantised."""
        return self.conversion.state.take_nonfinite() if self.conversion else None

    def gemm_counts(self) -> dict[str, dict[str, int]]:
        """Return how many quantised GEMMs each layer ran in training, by kind."""
        return {fqn: dict(counts) for fqn, counts in self.conversion.state.gemms.items()} if self.conversion else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart; the draws above are functions of (seed, step), so nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if state:
            raise ValueError(f"recipe {self.config.name} has no state, but the checkpoint holds {sorted(state)}")
