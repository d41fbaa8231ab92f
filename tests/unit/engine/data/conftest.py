"""Fixtures of the corpus tests: small real corpora and the program itself."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.data.meta import (
    META_FILE,
    META_VERSION,
    TRAIN_FILE,
    VAL_FILE,
    Meta,
    SplitCounts,
    corpus_digest,
    dump_meta,
)
from engine.data.shards import ShardWriter, unigram_entropy

ROOT = Path(__file__).resolve().parents[4]
Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def program_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def program(program_env: dict[str, str]) -> Program:
    """Run ``python -m engine.data prepare ...`` to its end."""

    def run(*arguments: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "engine.data", "prepare", *map(str, arguments)]
        return subprocess.run(
            command, env={**program_env, **env}, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """60 text files: some long, with umlauts, emoji, CRLF, tabs and trailing blanks."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        words = [f"word{(number * 7 + i * i) % 97}" for i in range(20 + number * 5)]
        text = f"Überschrift {number} 🦉\r\n\tfirst line\n" + " ".join(words) + "  \n\n\nlast line 'tis\n"
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a prepared folder with chosen tokens; ``sparse_train_tokens`` lengthens the training shard with a hole."""

    def make(
        name: str,
        train_tokens: npt.NDArray[np.integer],
        val_tokens: npt.NDArray[np.integer],
        *,
        vocab_size: int = 50_000,
        sparse_train_tokens: int | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        with (
            ShardWriter(folder / TRAIN_FILE, dtype, vocab_size) as train,
            ShardWriter(folder / VAL_FILE, dtype, vocab_size) as val,
        ):
            train.write(train_tokens)
            val.write(val_tokens)
            files = [train.meta(), val.meta()]
        n_train_tokens = train.n_tokens
        if sparse_train_tokens is not None:
            n_train_tokens, size = sparse_train_tokens, sparse_train_tokens * np.dtype(dtype).itemsize
            os.truncate(folder / TRAIN_FILE, size)
            files[0] = dataclasses.replace(files[0], bytes=size)
        meta = Meta(
            version=META_VERSION,
            tokenizer="byte",
            vocab_size=vocab_size,
            separator=0,
            dtype=dtype,
            n_train_tokens=n_train_tokens,
            n_val_tokens=val.n_tokens,
            n_documents=SplitCounts(train=1, val=1),
            n_duplicates=0,
            n_empty=0,
            bytes=SplitCounts(train=1, val=1),
            val_fraction=0.5,
            source=(),
            unigram_entropy=unigram_entropy(train.counts, val.counts),
            files=tuple(files),
            digest=corpus_digest(dtype=dtype, tokenizer="byte", files=files),
            request="",
        )
        (folder / META_FILE).write_text(dump_meta(meta))
        return folder

    return make
