"""Deterministic batches from a prepared folder. The only module of this package that imports torch."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.config import ConfigError, Problem
from engine.data.meta import TRAIN_FILE, VAL_FILE, load_meta, verify_files


class TokenDataset:
    """Memory-mapped token shards of a prepared folder.

    The order of the training windows is a pure function of (seed, step, position in the global batch): it does not
    depend on micro-batching, the number of ranks, or where a run was resumed.
    """

    def __init__(self, path: Path, *, expected_digest: str | None) -> None:
        """Open the folder and check its meta, its file sizes and, unless None, its digest.

        Raises:
            ConfigError: if the folder is no whole prepared folder or holds another corpus.
        """
        self.path, self.meta = path, load_meta(path)
        if expected_digest is not None and self.meta.digest != expected_digest:
            raise ConfigError(
                [
                    Problem(
                        path=("data", "digest"),
                        message=f"{path} holds corpus {self.meta.digest}; this run was launched with {expected_digest}",
                        hint="restore the sources and prepare again, or launch a sweep of another name",
                    )
                ]
            )
        dtype = np.dtype(self.meta.dtype).newbyteorder("<")
        self._train = np.memmap(path / TRAIN_FILE, dtype=dtype, mode="r")
        self._val = np.memmap(path / VAL_FILE, dtype=dtype, mode="r")

    @property
    def digest(self) -> str:
        """Digest of the corpus, 16 hex digits."""
        return self.meta.digest

    @property
    def unigram_entropy(self) -> float:
        """Cross-entropy of the unigram model on the held-out tokens, nats per token."""
        return self.meta.unigram_entropy

    def verify(self) -> None:
        """Read everything and compare it with the hashes in the meta.

        Raises:
            ConfigError: naming each file that differs.
        """
        verify_files(self.path, self.meta)

    def num_train_windows(self, seq_len: int) -> int:
        """Count the windows of one epoch: window i is tokens i·seq_len .. (i + 1)·seq_len, the last a target only."""
        return max(0, (self.meta.n_train_tokens - 1) // seq_len)

    def num_val_windows(self, seq_len: int) -> int:
        """Count the windows of the held-out split."""
        return max(0, (self.meta.n_val_tokens - 1) // seq_len)

    def check(
        self, *, seq_len: int, local_batch_size: int, global_batch_size: int, val_batches: int, model_vocab_size: int
    ) -> None:
        """Check once, before training, that the corpus can serve a configuration.

        Raises:
            ConfigError: with everything that does not fit.
        """
        problems = []
        if self.meta.vocab_size > model_vocab_size:
            problems.append(
                Problem(
                    path=("model", "vocab_size"),
                    message=f"{model_vocab_size} is smaller than the corpus's vocabulary of {self.meta.vocab_size}",
                    hint=f"set model.vocab_size to at least {self.meta.vocab_size}",
                )
            )
        if global_batch_size % local_batch_size:
            problems.append(
                Problem(
                    path=("training", "global_batch_size"),
                    message=f"{global_batch_size} is not divisible by local_batch_size {local_batch_size}",
                )
            )
        if self.num_train_windows(seq_len) < 1:
            problems.append(self._too_short("training", self.meta.n_train_tokens, seq_len))
        needed, there = val_batches * local_batch_size, self.num_val_windows(seq_len)
        if there < 1:
            problems.append(self._too_short("validation", self.meta.n_val_tokens, seq_len))
        elif there < needed:
            problems.append(self._too_few_val(there, needed, local_batch_size, seq_len))
        if problems:
            raise ConfigError(problems)

    def _too_short(self, split: str, n_tokens: int, seq_len: int) -> Problem:
        return Problem(
            path=("training", "seq_len"),
            message=f"the {split} split of {self.path} has {n_tokens} tokens; a window is seq_len + 1 = {seq_len + 1}",
            hint="lower training.seq_len or prepare a larger corpus",
        )

    def _too_few_val(self, there: int, needed: int, local_batch_size: int, seq_len: int) -> Problem:
        fits = there // local_batch_size
        lower = f"lower validation.batches to at most {fits}, or " if fits else ""
        return Problem(
            path=("validation", "batches"),
            message=f"validation needs {needed} windows of {seq_len} tokens (batches x local_batch_size); "
            f"the held-out split has {there} ({self.meta.n_val_tokens} tokens)",
            hint=f"{lower}hold out more (data.val_fraction {self.meta.val_fraction:g})",
        )

    def train_batch(
        self,
        seed: int,
        step: int,
        *,
        micro_batch: int,
        local_batch_size: int,
        global_batch_size: int,
        seq_len: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, targets) of one micro-batch of one rank, int64 [local_batch_size, seq_len] each.

        Row j of micro-batch m on rank r is position (m·world_size + r)·local_batch_size + j of the global batch; with
        ``step`` 1-based its sample number is (step − 1)·global_batch_size + position. Every epoch visits each window
        once, in an order of its own.

        Raises:
            ConfigError: if the arguments do not divide or lie out of range, or the corpus is shorter than a window.
        """
        per_micro_batch = local_batch_size * world_size
        problems = []
        if global_batch_size % per_micro_batch:
            problems.append(
                Problem(
                    path=("training", "global_batch_size"),
                    message=f"{global_batch_size} is not divisible by local_batch_size {local_batch_size} "
                    f"x world_size {world_size}",
                )
            )
        for name, value, low, high in (
            ("step", step, 1, None),
            ("seed", seed, 0, 2**63),
            ("rank", rank, 0, world_size),
            ("micro_batch", micro_batch, 0, max(1, global_batch_size // per_micro_batch)),
        ):
            if value < low or (high is not None and value >= high):
                expected = f"{low} .. {high - 1}" if high is not None else f"at least {low}"
                problems.append(Problem(path=(name,), message=f"{value} is out of range; expected {expected}"))
        windows = self.num_train_windows(seq_len)
        if windows < 1:
            problems.append(self._too_short("training", self.meta.n_train_tokens, seq_len))
        if problems:
            raise ConfigError(problems)
        first = (step - 1) * global_batch_size + (micro_batch * world_size + rank) * local_batch_size
        chosen = [
            int(epoch_order(seed, sample // windows, windows)[sample % windows])
            for sample in range(first, first + local_batch_size)
        ]
        return _gather(self._train, chosen, seq_len)

    def val_batch(
        self, index: int, *, local_batch_size: int, seq_len: int, num_batches: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, targets) of validation batch ``index`` of ``num_batches``, int64 [local_batch_size, seq_len].

        The num_batches · local_batch_size windows are spaced evenly over the held-out split, the same ones each time.

        Raises:
            ConfigError: if ``index`` is out of range or the split has fewer windows than that.
        """
        if not 0 <= index < num_batches:
            raise ConfigError(
                [Problem(path=("index",), message=f"{index} is out of range; expected 0 .. {num_batches - 1}")]
            )
        needed, there = num_batches * local_batch_size, self.num_val_windows(seq_len)
        if there < 1:
            raise ConfigError([self._too_short("validation", self.meta.n_val_tokens, seq_len)])
        if there < needed:
            raise ConfigError([self._too_few_val(there, needed, local_batch_size, seq_len)])
        chosen = [(index * local_batch_size + j) * there // needed for j in range(local_batch_size)]
        return _gather(self._val, chosen, seq_len)


@functools.lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, windows: int) -> npt.NDArray[np.intp]:
    """Return the order of one epoch: a permutation of 0 .. windows − 1, shape [windows], read-only.

    The rank of ``windows`` raw 64-bit words of Philox-4x64 with key (seed, epoch). Raw words and a stable sort keep
    their meaning across numpy versions, which ``Generator.permutation`` does not promise.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(windows)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order


def _gather(tokens: npt.NDArray[np.integer], windows: list[int], seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = np.stack([tokens[w * seq_len : (w + 1) * seq_len + 1] for w in windows]).astype(np.int64)
    batch = torch.from_numpy(rows)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
