"""What a prepared folder holds: ``meta.json``, the names of its files, its digest. Standard library only.

Layout of a prepared folder::

    train-00000.bin  val-00000.bin   token ids, little endian, uint16 (vocabulary up to 65536) or uint32
    tokenizer.json                   the BPE in the tokenizers library's format; absent for bytes
    meta.json                        a :class:`Meta`
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.config import ConfigError, Problem, canonical_json, from_dict, to_dict

META_VERSION = 1
META_FILE = "meta.json"
TOKENIZER_FILE = "tokenizer.json"
TRAIN_FILE = "train-00000.bin"
VAL_FILE = "val-00000.bin"
DATA_FILES = (META_FILE, TOKENIZER_FILE, TRAIN_FILE, VAL_FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileMeta:
    """One data file of a prepared folder."""

    name: str
    """Name inside the folder."""
    bytes: int
    """Size, bytes."""
    sha256: str
    """SHA-256 of its bytes, hexadecimal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCounts:
    """A count for each split."""

    train: int
    """Of the training split."""
    val: int
    """Of the held-out split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceMeta:
    """What one ``--source`` contributed."""

    source: str
    """The source as the user gave it."""
    kind: Literal["stdlib", "files"]
    """``stdlib`` or files (text and JSONL)."""
    files: int
    """Files read."""
    documents: int
    """Documents found in them, duplicates and empty ones included."""
    skipped: int
    """Files of the standard library that are no text in UTF-8; always 0 for other sources, where they are errors."""
    python: str | None = None
    """Version of the Python whose standard library was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """Contents of ``meta.json``. Holds no time and no output path, so equal inputs give equal bytes."""

    version: int
    """Version of this layout."""
    tokenizer: str
    """``byte`` or ``bpe:N`` as asked for."""
    vocab_size: int
    """Token ids lie in 0 .. vocab_size - 1. A BPE can end below N when the corpus has no more pairs to merge."""
    separator: int
    """Token id that ends each document."""
    dtype: Literal["uint16", "uint32"]
    """Type of the token ids on disk, little endian."""
    n_train_tokens: int
    """Tokens of the training split, separators included."""
    n_val_tokens: int
    """Tokens of the held-out split, separators included."""
    n_documents: SplitCounts
    """Documents of each split after deduplication."""
    n_duplicates: int
    """Documents dropped because an equal one came before."""
    n_empty: int
    """Documents without any text, dropped."""
    bytes: SplitCounts
    """UTF-8 bytes of the documents of each split, separators not included."""
    val_fraction: float
    """Share of the documents that was asked to be held out."""
    source: tuple[SourceMeta, ...]
    """Where the documents came from, in order."""
    unigram_entropy: float
    """Cross-entropy of the training tokens' add-one smoothed unigram model on the held-out tokens, nats per token.
    A model whose validation loss is not below this has learnt no more than token frequencies."""
    files: tuple[FileMeta, ...]
    """The data files."""
    digest: str
    """:func:`corpus_digest` of the above: equal digest, equal tokens."""
    request: str
    """Digest of what was asked for: tokeniser, val_fraction and the SHA-256 of every document in order."""

    def summary(self, path: Path) -> dict[str, str | int | float]:
        """Return what ``prepare --json`` prints."""
        return {
            "path": str(path),
            "digest": self.digest,
            "vocab_size": self.vocab_size,
            "n_train_tokens": self.n_train_tokens,
            "n_val_tokens": self.n_val_tokens,
            "unigram_entropy": self.unigram_entropy,
        }


def corpus_digest(*, dtype: str, tokenizer: str, files: Iterable[FileMeta]) -> str:
    """Return 16 hex digits of a SHA-256 over the tokens of both splits, their dtype and the tokeniser's definition.

    The files enter by their own SHA-256; the definition of a BPE is its ``tokenizer.json``, that of bytes is the name.
    """
    tree = {"version": META_VERSION, "dtype": dtype, "tokenizer": tokenizer, "files": [to_dict(f) for f in files]}
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()[:16]


def dump_meta(meta: Meta) -> str:
    """Return the text of ``meta.json``."""
    return json.dumps(to_dict(meta), indent=2, allow_nan=False) + "\n"


class OtherLayoutError(ConfigError):
    """A prepared folder of a layout that this version does not read."""


def made_by_prepare(folder: Path) -> bool:
    """Say whether a folder, however damaged, can only come from ``prepare``.

    Its shards have names of their own; ``meta.json`` and ``tokenizer.json`` are names that other programs use too.
    """
    if (folder / TRAIN_FILE).is_file() and (folder / VAL_FILE).is_file():
        return True
    try:
        tree = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and {"version", "tokenizer", "files", "digest", "request"} <= tree.keys()


def _fail(message: str, hint: str = "") -> ConfigError:
    return ConfigError([Problem(path=("data", "path"), message=message, hint=hint)])


def load_meta(folder: Path) -> Meta:
    """Read and check ``meta.json`` of a prepared folder: layout, version, own digest, presence and size of each file.

    Raises:
        ConfigError: if the folder is missing, is no prepared folder, or is damaged.
    """
    path = folder / META_FILE
    again = "make it again with `lptctl data prepare`"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {META_FILE}" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        raise _fail(f"{folder} {what}; expected a folder made by `lptctl data prepare`") from None
    except OSError as error:
        raise _fail(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # no UTF-8, no JSON
        raise _fail(f"{path} is no JSON: {error}", again) from error
    version = tree.get("version") if isinstance(tree, dict) else None
    if version != META_VERSION:
        message = f"{path} has layout version {version}; this engine reads {META_VERSION}"
        raise OtherLayoutError([Problem(path=("data", "path"), message=message, hint=again)])
    try:
        meta = from_dict(Meta, tree)
    except ConfigError as error:
        raise ConfigError(
            [
                dataclasses.replace(p, path=(), message=f"{path}: {p.dotted}: {p.message}", hint=again)
                for p in error.problems
            ]
        ) from error
    computed = corpus_digest(dtype=meta.dtype, tokenizer=meta.tokenizer, files=meta.files)
    if computed != meta.digest:
        raise _fail(f"{path} was edited: it says digest {meta.digest}, its fields give {computed}", again)
    itemsize = 2 if meta.dtype == "uint16" else 4
    problems = []
    for name, n_tokens in ((TRAIN_FILE, meta.n_train_tokens), (VAL_FILE, meta.n_val_tokens)):
        if {file.bytes for file in meta.files if file.name == name} != {n_tokens * itemsize}:
            problems.append(f"{path} contradicts itself: {name} does not hold {n_tokens} tokens of {meta.dtype}")
    for file in meta.files:
        try:
            size = (folder / file.name).stat().st_size
        except FileNotFoundError:
            problems.append(f"{folder / file.name} is missing")
            continue
        except OSError as error:
            raise _fail(f"{folder / file.name} cannot be read: {error.strerror or error}") from error
        if size != file.bytes:
            problems.append(f"{folder / file.name} has {size} bytes; {META_FILE} says {file.bytes}")
    if problems:
        raise ConfigError([Problem(path=("data", "path"), message=m, hint=again) for m in problems])
    return meta


def verify_files(folder: Path, meta: Meta) -> None:
    """Read every data file and compare its SHA-256 with ``meta.json``.

    Raises:
        ConfigError: naming each file that differs.
    """
    problems = []
    for file in meta.files:
        with (folder / file.name).open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != file.sha256:
            problems.append(
                Problem(
                    path=("data", "path"),
                    message=f"{folder / file.name} has SHA-256 {found[:16]}…; {META_FILE} says {file.sha256[:16]}…",
                    hint="the file was changed or damaged; make the folder again with `lptctl data prepare`",
                )
            )
    if problems:
        raise ConfigError(problems)
