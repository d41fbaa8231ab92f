"""Write token shards, and the statistics taken on the way. numpy."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.data.meta import FileMeta


class ShardWriter:
    """Append tokens to one file; keep its hash and the count of each token id."""

    def __init__(self, path: Path, dtype: str, vocab_size: int) -> None:
        self.path, self.n_tokens = path, 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._sha256 = hashlib.sha256()
        self._file = path.open("wb")

    def write(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append token ids, shape [n]."""
        raw = tokens.astype(self._dtype).tobytes()
        self._file.write(raw)
        self._sha256.update(raw)
        self.counts += np.bincount(tokens, minlength=len(self.counts))
        self.n_tokens += len(tokens)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def meta(self) -> FileMeta:
        """Flush and describe the file."""
        self._file.flush()
        return FileMeta(name=self.path.name, bytes=self.path.stat().st_size, sha256=self._sha256.hexdigest())


def unigram_entropy(train_counts: npt.NDArray[np.int64], val_counts: npt.NDArray[np.int64]) -> float:
    """Return the cross-entropy of the training tokens' unigram model on the held-out tokens, nats per token.

    −Σ_v (val_v / n_val) · ln((train_v + 1) / (n_train + V)), counts of shape [V]: add-one smoothed, so a token that
    only the held-out split has costs much but not infinitely much. Separators count like any other token.
    """
    total, n_val = int(train_counts.sum()) + len(train_counts), int(val_counts.sum())
    present = np.flatnonzero(val_counts)
    return (
        math.fsum(
            int(n) * (math.log(total) - math.log(int(t) + 1))
            for n, t in zip(val_counts[present], train_counts[present], strict=True)
        )
        / n_val
    )
