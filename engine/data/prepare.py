"""Turn sources into a prepared folder: read, deduplicate, split, tokenise, publish. numpy; tokenizers for a BPE.

Two passes, so that memory holds one document, one batch and a hash of each document, not the corpus: the first checks
every document and decides where it goes, the second writes tokens. A BPE adds a pass over the training documents
between them, whose counts of distinct words stay in memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.config import ConfigError, DataConfig, Problem, canonical_json
from engine.data.folder import publish
from engine.data.meta import (
    META_FILE,
    META_VERSION,
    TOKENIZER_FILE,
    TRAIN_FILE,
    VAL_FILE,
    FileMeta,
    Meta,
    SourceMeta,
    SplitCounts,
    corpus_digest,
    dump_meta,
    load_meta,
    verify_files,
)
from engine.data.output import check_out, reserved, reusable, there_already
from engine.data.progress import Progress
from engine.data.shards import ShardWriter, unigram_entropy
from engine.data.sources import Document, Source, is_prepared, resolve_source
from engine.data.tokenise import BpeTokenizer, ByteTokenizer, Tokenizer

BATCH_BYTES = 4 << 20
TRAIN, VAL, DROP = 0, 1, 2


def _problem(key: str, message: str, hint: str = "") -> Problem:
    return Problem(path=(key,), message=message, hint=hint)


@dataclass(slots=True)
class _Plan:
    """What the first pass decided."""

    split: bytearray = field(default_factory=bytearray)
    """TRAIN, VAL or DROP for each document, in reading order."""
    fingerprint: str = ""
    """SHA-256 over the SHA-256 of each document, in reading order."""
    documents: list[int] = field(default_factory=lambda: [0, 0])
    """Documents of each split."""
    bytes: list[int] = field(default_factory=lambda: [0, 0])
    """UTF-8 bytes of each split."""
    duplicates: int = 0
    empty: int = 0
    kept: str = ""
    """SHA-256 over the SHA-256 of each kept document: equal ``kept``, equal corpus."""
    source: list[SourceMeta] = field(default_factory=list)


def held_out(document_sha256: bytes, val_fraction: float) -> bool:
    """Say whether a document belongs to the validation split: first 64 bits of its SHA-256 below val_fraction · 2^64.

    Depends on the text alone, so adding documents moves none from one side to the other.
    """
    return int.from_bytes(document_sha256[:8], "big") < int(val_fraction * 2.0**64)


def _scan(sources: list[Source], config: DataConfig, progress: Progress, problems: list[Problem]) -> _Plan:
    """Read everything once; append to ``problems`` whatever makes the corpus unusable."""
    plan = _Plan()
    seen: set[bytes] = set()
    everything, kept = hashlib.sha256(), hashlib.sha256()
    progress.phase("read", sum(source.total_bytes() for source in sources))
    for source in sources:
        before = len(plan.split)
        for document in source.read(text_key=config.text_key, problems=problems):
            progress.add(len(document.data))
            sha256 = hashlib.sha256(document.data).digest()
            everything.update(sha256)
            if not document.data or sha256 in seen:
                plan.split.append(DROP)
                if document.data:
                    plan.duplicates += 1
                else:
                    plan.empty += 1
                continue
            seen.add(sha256)
            if config.tokenizer == "byte" and b"\0" in document.data:
                where = document.data.index(b"\0")
                problems.append(
                    _problem(
                        "source",
                        f"{document.origin} has byte 0 at offset {where} of its text; byte 0 ends a document",
                        "remove it, or take a BPE: --tokenizer bpe:2048",
                    )
                )
            split = VAL if held_out(sha256, config.val_fraction) else TRAIN
            plan.split.append(split)
            plan.documents[split] += 1
            plan.bytes[split] += len(document.data)
            kept.update(sha256)
        documents = len(plan.split) - before
        skipped = len(source.files) - documents if source.is_stdlib else 0
        plan.source.append(source.describe(documents=documents, skipped=skipped))
    plan.fingerprint, plan.kept = everything.hexdigest(), kept.hexdigest()
    if not problems:
        problems += _too_small(plan, config.val_fraction)
    return plan


def _too_small(plan: _Plan, val_fraction: float) -> list[Problem]:
    total = plan.documents[TRAIN] + plan.documents[VAL]
    if total == 0:
        return [
            _problem("source", f"the corpus is empty: {plan.empty} documents, none with text", "give other sources")
        ]
    if all(plan.documents):
        return []
    which = "training" if plan.documents[TRAIN] == 0 else "held-out"
    move = "lower" if plan.documents[TRAIN] == 0 else "raise"
    return [
        _problem(
            "val_fraction",
            f"{val_fraction:g} of {total} document(s) leaves none on the {which} side "
            "(each text file and each JSONL record is one document)",
            f"give more documents or {move} it; a large text is cut by: "
            "mkdir parts && split -C 64K --additional-suffix=.txt FILE parts/",
        )
    ]


def _documents(sources: list[Source], config: DataConfig, plan: _Plan) -> Iterator[tuple[int, Document]]:
    """Read the documents again, each with its split; refuse a corpus that changed since the first pass."""
    problems: list[Problem] = []
    everything = hashlib.sha256()
    count = 0
    for source in sources:
        for document in source.read(text_key=config.text_key, problems=problems):
            everything.update(hashlib.sha256(document.data).digest())
            if count < len(plan.split) and plan.split[count] != DROP:
                yield plan.split[count], document
            count += 1
    if problems or count != len(plan.split) or everything.hexdigest() != plan.fingerprint:
        problems.append(
            _problem("source", "the sources changed while they were read", "run again when nobody writes to them")
        )
        raise ConfigError(problems)


def _batches(documents: Iterator[tuple[int, Document]], progress: Progress) -> Iterator[tuple[int, list[bytes]]]:
    """Group documents of one split, in order, to about BATCH_BYTES."""
    batches: list[list[bytes]] = [[], []]
    sizes = [0, 0]
    for split, document in documents:
        batches[split].append(document.data)
        sizes[split] += len(document.data)
        progress.add(len(document.data))
        if sizes[split] >= BATCH_BYTES:
            yield split, batches[split]
            batches[split], sizes[split] = [], 0
    yield from ((split, batch) for split, batch in enumerate(batches) if batch)


def _tokenizer(sources: list[Source], config: DataConfig, plan: _Plan, progress: Progress) -> Tokenizer:
    if config.tokenizer == "byte":
        return ByteTokenizer()
    wanted = int(config.tokenizer.removeprefix("bpe:"))
    progress.phase("BPE training: counted words of", plan.bytes[TRAIN])

    def training() -> Iterator[bytes]:
        for split, document in _documents(sources, config, plan):
            if split == TRAIN:
                progress.add(len(document.data))
                yield document.data

    tokenizer = BpeTokenizer.train(training(), wanted)
    if tokenizer.vocab_size < wanted:
        progress.say(f"the BPE ends at {tokenizer.vocab_size} of {wanted} entries: no pair is left that occurs twice")
    return tokenizer


def _write(
    folder: Path, sources: list[Source], config: DataConfig, plan: _Plan, tokenizer: Tokenizer, progress: Progress
) -> Meta:
    """Fill ``folder`` with shards, tokenizer.json and meta.json."""
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    progress.phase("encoded", sum(plan.bytes))
    with (
        ShardWriter(folder / TRAIN_FILE, dtype, tokenizer.vocab_size) as train,
        ShardWriter(folder / VAL_FILE, dtype, tokenizer.vocab_size) as val,
    ):
        for split, batch in _batches(_documents(sources, config, plan), progress):
            (val if split == VAL else train).write(tokenizer.encode(batch))
        files = [train.meta(), val.meta()]
    definition = tokenizer.definition()
    if definition is not None:
        (folder / TOKENIZER_FILE).write_bytes(definition)
        sha256 = hashlib.sha256(definition).hexdigest()
        files.append(FileMeta(name=TOKENIZER_FILE, bytes=len(definition), sha256=sha256))
    meta = Meta(
        version=META_VERSION,
        tokenizer=config.tokenizer,
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        dtype=dtype,
        n_train_tokens=train.n_tokens,
        n_val_tokens=val.n_tokens,
        n_documents=SplitCounts(train=plan.documents[TRAIN], val=plan.documents[VAL]),
        n_duplicates=plan.duplicates,
        n_empty=plan.empty,
        bytes=SplitCounts(train=plan.bytes[TRAIN], val=plan.bytes[VAL]),
        val_fraction=config.val_fraction,
        source=tuple(plan.source),
        unigram_entropy=unigram_entropy(train.counts, val.counts),
        files=tuple(files),
        digest=corpus_digest(dtype=dtype, tokenizer=config.tokenizer, files=files),
        request=_request(config, plan),
    )
    (folder / META_FILE).write_text(dump_meta(meta), encoding="utf-8")
    return meta


def _request(config: DataConfig, plan: _Plan) -> str:
    asked = {
        "version": META_VERSION,
        "tokenizer": config.tokenizer,
        "val_fraction": config.val_fraction,
        "documents": plan.kept,
    }
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


def prepare(
    config: DataConfig, out: Path, *, force: bool = False, progress: Progress | None = None
) -> tuple[Meta, bool]:
    """Make the prepared folder ``out`` of ``config``'s sources; return its meta and whether it was there already.

    ``config.path`` and ``config.digest`` are not used. The folder appears whole or not at all, two at once do not
    disturb each other, and a second call with the same documents and options only reads the sources.

    Raises:
        ConfigError: with everything that is wrong with the sources, the split or ``out``.
        OSError: if ``out`` cannot be written.
    """
    progress = progress or Progress()
    out = Path(os.path.realpath(out))  # Path.resolve() raises RuntimeError on a loop of links
    problems = check_out(out)
    prepared = [Path(given) for given in config.source if is_prepared(Path(given))]
    if prepared and len(config.source) > 1:
        problems.append(_problem("source", f"{prepared[0]} is a prepared folder and must be the only source"))
    resolved = [None if Path(g) in prepared else resolve_source(g, problems) for g in config.source]
    sources = [source for source in resolved if source is not None]
    if prepared and not problems:
        return _copy(prepared[0].resolve(), out, force=force, progress=progress)
    plan = _scan(sources, config, progress, problems)
    if problems:
        raise ConfigError(problems)

    def differs(meta: Meta) -> str:
        options = [
            f"{name} {before} there, {now} here"
            for name, before, now in (
                ("tokenizer", meta.tokenizer, config.tokenizer),
                ("val_fraction", meta.val_fraction, config.val_fraction),
            )
            if before != now
        ]
        return ", ".join(options) or "its documents differ from those of the sources now"

    request = _request(config, plan)

    def wanted(meta: Meta) -> bool:
        return meta.request == request

    meta = there_already(out, wanted)
    if meta is not None:
        return meta, True
    with reserved(out, progress):
        meta = reusable(out, wanted, differs, force=force, progress=progress)
        if meta is not None:
            return meta, True
        tokenizer = _tokenizer(sources, config, plan, progress)
        with publish(out) as folder:
            return _write(folder, sources, config, plan, tokenizer, progress), False


def _copy(source: Path, out: Path, *, force: bool, progress: Progress) -> tuple[Meta, bool]:
    """Copy a prepared folder after checking every byte of it."""
    meta = load_meta(source)
    verify_files(source, meta)
    progress.say(
        f"{source} is a prepared folder ({meta.tokenizer}, digest {meta.digest}) and is taken as it is: "
        "--tokenizer, --text-key and --val-fraction do not apply"
    )
    if out == source:
        return meta, True

    def wanted(there: Meta) -> bool:
        return there.digest == meta.digest

    def differs(there: Meta) -> str:
        return f"digest {there.digest} there, {meta.digest} here"

    existing = there_already(out, wanted)
    if existing is not None:
        return existing, True
    with reserved(out, progress):
        existing = reusable(out, wanted, differs, force=force, progress=progress)
        if existing is not None:
            return existing, True
        with publish(out) as folder:
            for file in (*meta.files, FileMeta(name=META_FILE, bytes=0, sha256="")):
                shutil.copyfile(source / file.name, folder / file.name)
        return meta, False
