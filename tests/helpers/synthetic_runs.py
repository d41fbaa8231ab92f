"""Run directories with plausible curves, written through the engine's own configuration and log records.

Same seed, same data: the batch noise of a seed is common to all recipes, as it is in real paired runs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import (
    RunConfig,
    RunPaths,
    StepRecord,
    append_step,
    dump_run,
    from_dict,
    resolve_model,
    resolve_recipe,
)
from engine.config.records import append_line

START = 1_800_000_000.0
ENTROPY = 3.3125
GAPS = {
    "bf16": 0.0,
    "baseline": 0.055,
    "lpt": 0.021,
    "midmax": 0.021,
    "uos": 0.014,
    "floor": 0.09,
    "forward_only": 0.009,
}
"""Loss above bf16 at the end, nats/token."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """What happens to a run."""

    stop_at: int | None = None
    """Leave after this step, without an exit event unless ``cause`` is set."""
    cause: str = ""
    resume_from: int | None = None
    """After ``stop_at``, a second attempt continues from this step to the end."""
    resume_error: float = 0.0
    """Difference of the losses of steps run twice, nats/token."""
    nonfinite_at: int | None = None
    nonfinite_what: str = "loss"
    torn: bool = False
    """Leave half a line at the end of metrics.jsonl."""
    code_digest: str = "c0de" * 16
    init_digest: str | None = None


def losses(recipe: str, seed: int, steps: int) -> np.ndarray:
    """Training losses of steps 1 .. steps, nats/token."""
    common = np.random.default_rng([seed, 1])
    own = np.random.default_rng([seed, 2, sum(map(ord, recipe))])
    x = np.arange(1, steps + 1) / steps
    curve = 2.05 + 0.02 * common.normal() + 3.5 * np.exp(-7 * x) + 0.35 * np.exp(-2 * x)
    batch = common.normal(0, 0.07, steps)
    drift = np.convolve(own.normal(0, 0.02, steps + 19), np.full(20, 1 / 20), "valid") + own.normal(0, 0.003)
    gap = GAPS.get(recipe, 0.03) * np.minimum(1.0, x * 3)
    return curve + batch + (gap + drift if recipe != "bf16" else 0.0)


def config(
    recipe: Any, seed: int, *, sweep: str = "synthetic", steps: int = 120, log_every: int = 1, **sections: Any
) -> RunConfig:
    tree: dict[str, Any] = {
        "sweep": sweep,
        "run_id": "unnamed",
        "seed": seed,
        "recipe": resolve_recipe(recipe),
        "model": resolve_model("llama3_nano"),
        "training": {
            "steps": steps, "seq_len": 128, "global_batch_size": 8, "local_batch_size": 8, "compute_dtype": "float32",
        },
        "validation": {"every": max(1, steps // 6), "batches": 4},
        "runtime": {"threads": 1, "device": "cpu", "log_every": log_every},
    }  # fmt: skip
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    unnamed = from_dict(RunConfig, tree)
    tree["run_id"] = f"{unnamed.recipe.name}-s{seed}-{unnamed.identity_hash()}"
    return from_dict(RunConfig, tree)


def write_run(runs: Path, run: RunConfig, life: Life = Life()) -> Path:
    """Write one run directory below ``runs/<sweep>/`` and return it."""
    paths = RunPaths(runs / run.sweep / run.run_id)
    paths.root.mkdir(parents=True)
    paths.run_json.write_text(dump_run(run))
    paths.git_json.write_text(json.dumps({"revision": "0123456789abcdef" * 2, "dirty": False}))
    writer = _Writer(paths, run, life)
    end = min(run.training.steps, life.stop_at or run.training.steps)
    alive = writer.attempt(1, 0, end, is_last=life.resume_from is None)
    if alive and life.resume_from is not None:
        writer.attempt(2, life.resume_from, run.training.steps, is_last=True)
    if life.torn:
        with paths.metrics.open("ab") as file:
            file.write(b'{"step": 999, "attempt": 1, "ti')
    return paths.root


class _Writer:
    def __init__(self, paths: RunPaths, run: RunConfig, life: Life) -> None:
        self.paths, self.run, self.life, self.clock = paths, run, life, START
        self.losses = losses(run.recipe.name, run.seed, run.training.steps)
        self.noise = np.random.default_rng([run.seed, 3])

    def event(self, kind: str, attempt: int, **payload: Any) -> None:
        append_line(self.paths.events, {"time": self.clock, "kind": kind, "attempt": attempt, "node": "n0", **payload})

    def attempt(self, attempt: int, start: int, end: int, *, is_last: bool) -> bool:
        run, life = self.run, self.life
        steps, seed = run.training.steps, run.seed
        quantised = run.recipe.switches.elem_format != "none"
        self.event("submitted", attempt, executor="local", code_digest=life.code_digest, command=["python"])
        self.event(
            "started", attempt, pid=1, device="cpu", threads=1, data_digest="da7a" * 4, resumed_from=start,
            init_digest=life.init_digest or f"{seed:016x}", batch_digest=f"{seed + 77:016x}", unigram_entropy=ENTROPY,
            quantised_layers=[],
        )  # fmt: skip
        if start == 0:
            self._step(StepRecord(step=0, attempt=attempt, time=self.clock, tokens=0, val_loss=5.551))
        for step in range(start + 1, end + 1):
            self.clock += 0.3
            loss = float(self.losses[step - 1]) + (life.resume_error if attempt > 1 else 0.0)
            norm = 1.1 * math.exp(0.25 * float(self.noise.normal())) * (1 + 4 * math.exp(-12 * step / steps))
            is_bad = step == life.nonfinite_at
            if is_bad:
                loss = math.nan if life.nonfinite_what == "loss" else loss
                norm = math.inf if life.nonfinite_what == "grad_norm" else norm
            is_val = not is_bad and (step % run.validation.every == 0 or step == steps)
            if step % run.runtime.log_every == 0 or step in (1, steps) or is_val or is_bad:
                seconds = (0.9 if quantised else 0.3) * (1 + 0.02 * float(self.noise.normal()))
                tail = self.losses[max(0, step - 20) : step]
                self._step(
                    StepRecord(
                        step=step,
                        attempt=attempt,
                        time=self.clock,
                        tokens=step * run.training.tokens_per_step,
                        loss=loss,
                        val_loss=float(tail.mean()) + 0.04 if is_val else None,
                        grad_norm=norm,
                        clip_coef=min(1.0, 1 / norm),
                        lr=1e-3,
                        nonfinite_blocks=3 if is_bad else 0,
                        step_time_s=seconds,
                        tps=run.training.tokens_per_step / seconds,
                        tflops=0.01,
                        mfu=None,
                        memory_gib=0.4,
                    )
                )
            if is_bad:
                self.event("nonfinite", attempt, step=step, what=life.nonfinite_what, value="nan")
                self.event("exit", attempt, code=70, cause="nonfinite", step=step, message="")
                return False
        if end == steps:
            self.event("exit", attempt, code=0, cause="finished", step=end, message="")
        elif life.cause:
            self.event("exit", attempt, code=1, cause=life.cause, step=end, message="")
        return True

    def _step(self, record: StepRecord) -> None:
        append_step(self.paths.metrics, record)


def write_sweep(
    runs: Path, *, recipes: Any = ("bf16", "baseline", "lpt", "midmax", "uos"), seeds: Any = (1, 2, 3),
    lives: dict[tuple[str, int], Life] | None = None, **options: Any,
) -> Path:  # fmt: skip
    """Write recipes × seeds and return the sweep's folder; ``lives`` maps (recipe, seed) to a fate."""
    folders = [
        write_run(runs, config(recipe, seed, **options), (lives or {}).get((recipe, seed), Life()))
        for recipe in recipes
        for seed in seeds
    ]
    return folders[0].parent


ADVENTURES = {
    ("lpt", 1): Life(stop_at=73, resume_from=60),
    ("baseline", 2): Life(nonfinite_at=88),
    ("uos", 3): Life(stop_at=70, torn=True),
}
"""One resumed bit for bit, one that goes NaN, one still running."""
