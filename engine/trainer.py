"""The training loop: one class, read from top to bottom."""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any

import torch
import torch.nn.functional as F

from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.config import RunConfig, RunPaths, StepRecord, append_event
from engine.data.dataset import TokenDataset
from engine.metrics import MetricsLogger, memory_gib, peak_tflops
from engine.models.common import weights_digest
from engine.models.registry import build_model
from engine.optim import build_optimizer, learning_rate, set_learning_rate
from engine.recipes.base import Recipe

FINISHED, STOPPED, NONFINITE = 0, 75, 70


class NonFiniteError(RuntimeError):
    """A loss or gradient norm is Inf or NaN; the step's record is written, nothing else of it is kept."""


class Trainer:
    """Train one run from its newest checkpoint to the end, a stop request or a non-finite number."""

    def __init__(self, config: RunConfig, paths: RunPaths, *, attempt: int, device: torch.device) -> None:
        self.config, self.paths, self.attempt, self.device = config, paths, attempt, device
        self.stop_requested = False
        self.step = 0
        training = config.training
        path = config.data.path
        if path is None:
            raise ValueError("data.path is not set; `lptctl sweep launch` prepares the corpus and sets it")
        self.data = TokenDataset((paths.root / path).resolve(), expected_digest=config.data.digest)
        self.data.check(
            seq_len=training.seq_len,
            local_batch_size=training.local_batch_size,
            global_batch_size=training.global_batch_size,
            val_batches=config.validation.batches,
            model_vocab_size=config.model.vocab_size,
        )
        self.model = build_model(config.model, compute_dtype=training.compute_dtype, seed=config.seed, device=device)
        self.init_digest = weights_digest(self.model)
        self.recipe = Recipe(config)
        self.recipe.on_convert(self.model)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.flops_per_token = config.model.flops_per_token(training.seq_len)
        # A quantised run's GEMMs are emulated, so a percentage of the bf16 peak would mean nothing.
        self.peak_tflops = None if self.recipe.quantised_layers else peak_tflops(device)

    def event(self, kind: str, **payload: Any) -> None:
        """Append an event of this attempt."""
        append_event(self.paths.events, kind, attempt=self.attempt, **payload)

    def batch_digest(self) -> str:
        """Return the SHA-256 (first 16 hex digits) of the first step's token ids, all micro-batches."""
        digest = hashlib.sha256()
        for micro_batch in range(self.config.training.grad_accum_steps):
            for tensor in self._batch(1, micro_batch):
                digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def _batch(self, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        t = self.config.training
        inputs, targets = self.data.train_batch(
            self.config.seed,
            step,
            micro_batch=micro_batch,
            local_batch_size=t.local_batch_size,
            global_batch_size=t.global_batch_size,
            seq_len=t.seq_len,
        )
        return inputs.to(self.device), targets.to(self.device)

    def resume(self) -> None:
        """Restore the newest whole checkpoint, if any."""
        loaded = load_checkpoint(
            self.paths.checkpoints,
            identity=self.config.identity_hash(),
            device=self.device,
            on_unreadable=lambda step, error: self.event("checkpoint_unreadable", step=step, error=error),
        )
        if loaded is None:
            return
        self.step, state = loaded
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.recipe.load_state_dict(state["recipe"])

    def save(self) -> None:
        """Publish a checkpoint of the current step."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "recipe": self.recipe.state_dict(),
        }
        save_checkpoint(
            self.paths.checkpoints,
            step=self.step,
            identity=self.config.identity_hash(),
            state=state,
            keep=self.config.checkpoint.keep,
        )
        self.event("checkpoint", step=self.step)

    def fit(self) -> int:
        """Run to the end and return the exit code (0 finished, 75 stopped after a checkpoint).

        Raises:
            NonFiniteError: on the first non-finite loss, validation loss or gradient norm.
        """
        steps = self.config.training.steps
        saved_step = self.step
        with MetricsLogger(
            self.paths, attempt=self.attempt, device=self.device, tensorboard=self.config.runtime.tensorboard
        ) as logger:
            if self.step == 0:
                self._log_initial(logger)
            while self.step < steps:
                if self.stop_requested or self.paths.stop.exists():
                    if saved_step < self.step:
                        self.save()
                    return STOPPED
                self._train_step(logger)
                if self.step % self.config.checkpoint.every == 0 or self.step == steps:
                    self.save()
                    saved_step = self.step
        return FINISHED

    def _log_initial(self, logger: MetricsLogger) -> None:
        val_loss = self.validate()
        logger.log(StepRecord(step=0, attempt=self.attempt, time=time.time(), tokens=0, val_loss=val_loss))
        self._check_finite("val_loss", val_loss)

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            self.event("nonfinite", step=self.step, what=what, value=value)
            raise NonFiniteError(
                f"{what} is {value} at step {self.step}; nothing was checkpointed after the last good step"
            )

    def _forward_backward(self, step: int) -> float:
        """Accumulate the gradient of one global batch; return its mean loss (nats per token)."""
        training = self.config.training
        total = torch.zeros((), device=self.device)
        for micro_batch in range(training.grad_accum_steps):
            inputs, targets = self._batch(step, micro_batch)
            self.recipe.pre_micro_batch(step, micro_batch)
            logits = self.model(inputs)
            summed = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            loss = summed / training.tokens_per_step
            loss.backward()
            total += loss.detach()
        return total.item()

    def _train_step(self, logger: MetricsLogger) -> None:
        config, training = self.config, self.config.training
        started = time.perf_counter()
        step = self.step + 1
        lr = learning_rate(config.optimizer, step, training.steps)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._forward_backward(step)
        nonfinite_blocks = self.recipe.take_nonfinite_blocks()
        parameters = list(self.model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        grad_norm = norm.item()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        clip_coef = 1.0
        if finite:
            max_norm = config.optimizer.max_grad_norm
            if max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
                clip_coef = min(1.0, max_norm / (grad_norm + 1e-6))  # torch's own formula
            self.optimizer.step()
        self.step = step
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elapsed_s = time.perf_counter() - started

        every = config.validation.every
        val_loss = None
        if finite and (step == training.steps or (every and step % every == 0)):
            val_loss = self.validate()
        if not finite or val_loss is not None or step in (1, training.steps) or step % config.runtime.log_every == 0:
            tps = training.tokens_per_step / elapsed_s
            tflops = tps * self.flops_per_token / 1e12
            logger.log(
                StepRecord(
                    step=step,
                    attempt=self.attempt,
                    time=time.time(),
                    tokens=step * training.tokens_per_step,
                    loss=loss,
                    val_loss=val_loss,
                    grad_norm=grad_norm,
                    clip_coef=clip_coef,
                    lr=lr,
                    nonfinite_blocks=nonfinite_blocks,
                    step_time_s=elapsed_s,
                    tps=tps,
                    tflops=tflops,
                    mfu=None if self.peak_tflops is None else 100 * tflops / self.peak_tflops,
                    memory_gib=memory_gib(self.device),
                )
            )
        self._check_finite("loss", loss)
        self._check_finite("grad_norm", grad_norm)
        if val_loss is not None:
            self._check_finite("val_loss", val_loss)
            self.event("validated", step=step, val_loss=val_loss)

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean loss over the fixed validation batches, nats per token, with the recipe's forward."""
        training, validation = self.config.training, self.config.validation
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(validation.batches):
            inputs, targets = self.data.val_batch(
                index,
                local_batch_size=training.local_batch_size,
                seq_len=training.seq_len,
                num_batches=validation.batches,
            )
            logits = self.model(inputs.to(self.device))
            total += F.cross_entropy(
                logits.flatten(0, 1).float(), targets.to(self.device).flatten(), reduction="mean"
            ).double()
        self.model.train()
        return total.item() / validation.batches
