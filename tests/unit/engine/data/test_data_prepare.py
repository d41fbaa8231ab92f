"""Prepared folders: what is in them, what makes them equal, what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config import ConfigError, DataConfig
from engine.data.meta import DATA_FILES, META_FILE, TOKENIZER_FILE, TRAIN_FILE, VAL_FILE, Meta, load_meta
from engine.data.prepare import held_out, prepare
from engine.data.progress import Progress
from engine.data.shards import unigram_entropy
from engine.data.tokenise import BpeTokenizer

BPE = "bpe:330"
Program = Callable[..., subprocess.CompletedProcess[str]]


def make(out: Path, *source: Path | str, val_fraction: float = 0.3, force: bool = False, **options: str) -> Meta:
    config = DataConfig(source=tuple(map(str, source)), val_fraction=val_fraction, **options)
    return prepare(config, out, force=force)[0]


def again(out: Path, *source: Path | str, val_fraction: float = 0.3, **options: str) -> bool:
    """Prepare once more; say whether the folder was there already."""
    return prepare(DataConfig(source=tuple(map(str, source)), val_fraction=val_fraction, **options), out)[1]


def problems(out: Path, *source: Path | str, **options: str | float | bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make(out, *source, **options)
    return [str(p) for p in caught.value.problems]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def split_by_hand(documents: Sequence[bytes], val_fraction: float) -> tuple[list[bytes], list[bytes]]:
    """The documented rule again, in exact rationals: held out if the first 64 bits lie below the fraction."""
    numerator, denominator = val_fraction.as_integer_ratio()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for document in documents:
        first = int(hashlib.sha256(document).hexdigest()[:16], 16)
        parts[first * denominator < numerator << 64].append(document)
    return parts


def documents_of(texts: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(texts.glob("*.txt"))]


@pytest.fixture
def glob(texts: Path) -> str:
    return f"{texts}/*.txt"


def test_byte_shards_are_the_documents_of_each_split(texts: Path, glob: str, tmp_path: Path) -> None:
    meta = make(tmp_path / "out", glob)
    parts = split_by_hand(documents_of(texts), 0.3)
    for name, part in zip((TRAIN_FILE, VAL_FILE), parts, strict=True):
        raw = b"".join(document + b"\0" for document in part)
        assert np.fromfile(tmp_path / "out" / name, "<u2").tolist() == list(raw)
    assert (meta.n_documents.train, meta.n_documents.val) == tuple(map(len, parts))
    assert (meta.bytes.train, meta.bytes.val) == tuple(sum(map(len, part)) for part in parts)
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(DATA_FILES) - {TOKENIZER_FILE}
    assert load_meta(tmp_path / "out") == meta


def test_bpe_shards_decode_to_the_documents_of_each_split(texts: Path, glob: str, tmp_path: Path) -> None:
    meta = make(tmp_path / "out", glob, tokenizer=BPE)
    tokenizer = BpeTokenizer.load(tmp_path / "out" / TOKENIZER_FILE)
    assert tokenizer.vocab_size == meta.vocab_size == 330
    for name, part in zip((TRAIN_FILE, VAL_FILE), split_by_hand(documents_of(texts), 0.3), strict=True):
        tokens = np.fromfile(tmp_path / "out" / name, "<u2")
        ends = np.flatnonzero(tokens == meta.separator)
        pieces = np.split(tokens, ends + 1)[:-1]
        assert [tokenizer.decode(piece[:-1].tolist()).encode() for piece in pieces] == part


def test_split_depends_on_the_text_alone(texts: Path, glob: str, tmp_path: Path) -> None:
    make(tmp_path / "before", glob)
    for number in range(40):
        (texts / f"{number:03}-new.txt").write_text(f"another document {number}")
    make(tmp_path / "after", glob)
    for name in (TRAIN_FILE, VAL_FILE):
        before, after = (set(texts_in(tmp_path / folder / name)) for folder in ("before", "after"))
        assert before < after


def texts_in(shard: Path) -> list[bytes]:
    return bytes(np.fromfile(shard, "<u2").tolist()).split(b"\0")[:-1]


def test_held_out_share_is_the_fraction() -> None:
    n = 20_000
    for fraction in (0.05, 0.5):
        held = sum(held_out(hashlib.sha256(str(i).encode()).digest(), fraction) for i in range(n))
        assert abs(held - fraction * n) < 4 * math.sqrt(fraction * (1 - fraction) * n)


def test_equal_and_empty_documents_are_dropped_and_counted(glob: str, texts: Path, tmp_path: Path) -> None:
    before = make(tmp_path / "before", glob)
    (texts / "zz-copy.txt").write_bytes((texts / "000.txt").read_bytes())
    (texts / "zz-empty.txt").write_bytes(b"")
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": (texts / "001.txt").read_bytes().decode()}) + "\n")
    after = make(tmp_path / "after", glob, tmp_path / "more.jsonl")
    assert (after.n_duplicates, after.n_empty) == (2, 1)
    assert after.digest == before.digest
    assert [(s.kind, s.files, s.documents) for s in after.source] == [("files", 62, 62), ("files", 1, 1)]


def test_entropy_is_the_smoothed_unigram_models_on_the_held_out_tokens(glob: str, tmp_path: Path) -> None:
    meta = make(tmp_path / "out", glob)
    train, val = (np.fromfile(tmp_path / "out" / name, "<u2").tolist() for name in (TRAIN_FILE, VAL_FILE))
    counts = Counter(train)
    want = -sum(math.log((counts[token] + 1) / (len(train) + 256)) for token in val) / len(val)
    assert meta.unigram_entropy == pytest.approx(want, rel=1e-12)
    assert (len(train), len(val)) == (meta.n_train_tokens, meta.n_val_tokens)


def test_entropy_of_equal_uniform_splits_is_the_log_of_their_size() -> None:
    counts = np.array([0] + [10**6] * 64)
    assert unigram_entropy(counts, counts) == pytest.approx(math.log(64), rel=1e-6)


def test_digest_is_pinned(tmp_path: Path) -> None:
    """Run ids and frozen digests of launched sweeps rest on it: it may change with META_VERSION only."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "line {i} ü"}}\n' for i in range(40)))
    assert make(tmp_path / "out", tmp_path / "a.jsonl").digest == "66357bfe9cc9d8a2"


def test_digest_changes_with_content_options_and_order_only(glob: str, texts: Path, tmp_path: Path) -> None:
    base = make(tmp_path / "base", glob)
    names = sorted(map(str, texts.glob("*.txt")))
    same = {
        "listed": make(tmp_path / "listed", *names),
        "deep": make(tmp_path / "new" / "folders" / "deep", glob),
        "text_key": make(tmp_path / "key", glob, text_key="body"),
        "twice": make(tmp_path / "twice", glob, glob),
    }
    assert {meta.digest for meta in same.values()} == {base.digest}
    other = {
        "order": make(tmp_path / "order", *reversed(names)).digest,
        "fraction": make(tmp_path / "fraction", glob, val_fraction=0.4).digest,
        "tokenizer": make(tmp_path / "tokenizer", glob, tokenizer=BPE).digest,
        "vocabulary": make(tmp_path / "vocabulary", glob, tokenizer="bpe:331").digest,
        "less": make(tmp_path / "less", *names[1:]).digest,
    }
    (texts / "030.txt").write_bytes((texts / "030.txt").read_bytes()[:-1])
    other["one byte"] = make(tmp_path / "byte", glob).digest
    assert len({base.digest, *other.values()}) == 1 + len(other)


def test_equal_inputs_give_equal_folders_whatever_the_process(glob: str, tmp_path: Path, program: Program) -> None:
    for number, threads in enumerate(("1", "3")):
        arguments = ("--source", glob, "--tokenizer", BPE, "--val-fraction", "0.3", "--out", tmp_path / str(number))
        env = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "TOKENIZERS_PARALLELISM": "true"}
        done = program(*arguments, **env)
        assert done.returncode == 0, done.stderr
    make(tmp_path / "here", glob, tokenizer=BPE)
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "here")


def test_bpe_sees_no_held_out_text(glob: str, texts: Path, tmp_path: Path) -> None:
    make(tmp_path / "before", glob, tokenizer=BPE)
    number = next(i for i in range(99) if held_out(hashlib.sha256(f"zyzzyva {i} ".encode() * 500).digest(), 0.3))
    (texts / "zz.txt").write_text(f"zyzzyva {number} " * 500)
    make(tmp_path / "after", glob, tokenizer=BPE)
    before, after = contents(tmp_path / "before"), contents(tmp_path / "after")
    assert before[TOKENIZER_FILE] == after[TOKENIZER_FILE]
    assert before[TRAIN_FILE] == after[TRAIN_FILE]
    assert len(before[VAL_FILE]) < len(after[VAL_FILE])


def test_bpe_of_a_small_corpus_ends_early_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "ab {i}"}}\n' for i in range(30)))
    meta = make(tmp_path / "out", tmp_path / "a.jsonl", tokenizer="bpe:5000")
    assert 257 < meta.vocab_size < 400
    assert f"the BPE ends at {meta.vocab_size} of 5000 entries" in capsys.readouterr().err


def test_stdlib_is_a_source_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    for number in range(20):
        (library / f"m{number:02}.py").write_text(f"x = {number}\n")
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    meta = make(tmp_path / "out", "stdlib")
    (source,) = meta.source
    assert (source.kind, source.files, source.documents, source.skipped) == ("stdlib", 20, 20, 1)
    assert source.python is not None
    read = texts_in(tmp_path / "out" / TRAIN_FILE) + texts_in(tmp_path / "out" / VAL_FILE)
    assert sorted(read) == sorted(f"x = {number}\n".encode() for number in range(20))


def test_all_problems_of_all_sources_at_once(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"body": "x"}\nnonsense\n')
    found = problems(
        tmp_path / "out",
        *(tmp_path / name for name in ("gone.txt", "no*match", "latin.txt", "nul.txt", "bad.jsonl")),
        "stdlib" * 60,
    )
    assert len(found) == 7
    assert f"source: {tmp_path}/gone.txt does not exist" in found[0]
    assert f"source: {tmp_path}/no*match matches no file" in found[1]
    assert "cannot be read: File name too long" in found[2]
    assert f"{tmp_path}/latin.txt is no UTF-8: byte 0xe9 at offset 3" in found[3]
    assert f"{tmp_path}/nul.txt has byte 0 at offset 1 of its text; byte 0 ends a document" in found[4]
    assert f'{tmp_path}/bad.jsonl:2: no key "text"; this record has: "body"' in found[5]
    assert f"{tmp_path}/bad.jsonl:3: no JSON" in found[6]
    assert not (tmp_path / "out").exists()


def test_bpe_takes_text_with_byte_0(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "a\\u0000b {i}"}}\n' for i in range(30)))
    assert make(tmp_path / "out", tmp_path / "a.jsonl", tokenizer="bpe:300").n_documents.train > 0


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n{"text": ""}\n'])
def test_empty_corpus_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    (message,) = problems(tmp_path / "out", tmp_path / "a.jsonl")
    assert message.startswith(f"source: the corpus is empty: {content.count('text')} documents, none with text")
    (tmp_path / "b.txt").write_text("")
    assert "the corpus is empty: 1 documents" in problems(tmp_path / "out", tmp_path / "b.txt")[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("fraction", "which", "move"), [(1e-9, "held-out", "raise"), (1 - 1e-9, "training", "lower")])
def test_split_without_documents_is_refused(glob: str, tmp_path: Path, fraction: float, which: str, move: str) -> None:
    (message,) = problems(tmp_path / "out", glob, val_fraction=fraction)
    assert f"of 60 document(s) leaves none on the {which} side" in message
    assert f"or {move} it; a large text is cut by: mkdir parts && split -C 64K" in message


def test_second_time_the_folder_is_left_alone(glob: str, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, glob, tokenizer=BPE)
    before = {path: path.stat().st_mtime_ns for path in (out, *out.iterdir())}
    assert again(out, glob, tokenizer=BPE)
    assert again(out, *sorted(texts.glob("*.txt")), tokenizer=BPE)
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tokenizer": BPE}, "tokenizer byte there, bpe:330 here"),
        ({"val_fraction": 0.4}, "val_fraction 0.3 there, 0.4 here"),
        ({}, "its documents differ from those of the sources now"),
    ],
)
def test_another_corpus_is_replaced_by_force_only(
    glob: str, texts: Path, tmp_path: Path, options: dict[str, str | float], expected: str
) -> None:
    out = tmp_path / "out"
    digest = make(out, glob).digest
    before = contents(out)
    (texts / "000.txt").write_text("changed")
    (message,) = problems(out, glob, **options)
    assert f"{out} holds another corpus ({digest}): {expected} (give another --out, or --force" in message
    assert contents(out) == before
    assert make(out, glob, force=True, **options).digest == load_meta(out).digest != digest
    assert sorted(os.listdir(tmp_path)) == ["out", "texts"]


FOREIGN: list[dict[str, str]] = [
    {"notes.txt": "mine"},
    {TOKENIZER_FILE: "{}"},
    {META_FILE: '{"name": "of another program"}'},
    {META_FILE: "{"},
    {TRAIN_FILE: ""},
    {META_FILE: '{"version": 1}', "notes.txt": "mine", VAL_FILE: ""},
]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("files", FOREIGN, ids=lambda files: "+".join(files))
def test_folder_of_others_is_never_replaced(glob: str, tmp_path: Path, files: dict[str, str], force: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, text in files.items():
        (out / name).write_text(text)
    before = contents(out)
    (message,) = problems(out, glob, force=force)
    assert message.startswith(f"out: {out} holds ")
    assert "(give a new folder)" in message
    assert contents(out) == before


def test_file_or_loop_of_links_as_output_is_refused(glob: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("file", "loop"):
        (message,) = problems(tmp_path / name, glob)
        assert message == f"out: {tmp_path / name} exists and is no folder (give another --out)"
    assert (tmp_path / "file").read_text() == "mine"


def test_empty_folder_and_link_to_a_folder_are_taken(glob: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty", target_is_directory=True)
    make(tmp_path / "link", glob)
    assert (tmp_path / "link").is_symlink()
    assert again(tmp_path / "empty", glob)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "shorter shard": lambda out: os.truncate(out / TRAIN_FILE, 100),
    "flipped bit": lambda out: flip(out / VAL_FILE),
    "missing shard": lambda out: (out / VAL_FILE).unlink(),
    "torn meta.json": lambda out: os.truncate(out / META_FILE, 500),
    "flipped bit in tokenizer.json": lambda out: flip(out / TOKENIZER_FILE),
}


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("name", list(DAMAGES))
def test_damaged_folder_is_made_again(glob: str, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    make(out, glob, tokenizer=BPE)
    before = contents(out)
    DAMAGES[name](out)
    assert contents(out) != before
    assert not again(out, glob, tokenizer=BPE)
    assert contents(out) == before
    assert f"prepare: {out} is damaged and is made again: {out}/" in capsys.readouterr().err


def test_folder_of_another_layout_needs_force(glob: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, glob)
    tree = json.loads((out / META_FILE).read_text())
    (out / META_FILE).write_text(json.dumps({**tree, "version": 2}))
    (message,) = problems(out, glob)
    assert message.startswith(f"out: {out}/{META_FILE} has layout version 2; this engine reads 1 (give another --out")
    assert make(out, glob, force=True) == load_meta(out)


def test_prepared_folder_as_source_is_copied(glob: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make(tmp_path / "first", glob, tokenizer=BPE)
    assert make(tmp_path / "copy", tmp_path / "first") == first
    assert contents(tmp_path / "first") == contents(tmp_path / "copy")
    assert "--tokenizer, --text-key and --val-fraction do not apply" in capsys.readouterr().err
    assert again(tmp_path / "copy", tmp_path / "first")
    assert again(tmp_path / "copy", tmp_path / "copy")
    make(tmp_path / "other", glob)
    (message,) = problems(tmp_path / "copy", tmp_path / "other")
    assert f"digest {first.digest} there, {load_meta(tmp_path / 'other').digest} here" in message


def test_prepared_folder_must_be_the_only_source_and_whole(glob: str, tmp_path: Path) -> None:
    make(tmp_path / "first", glob)
    (message,) = problems(tmp_path / "out", tmp_path / "first", glob)
    assert message == f"source: {tmp_path}/first is a prepared folder and must be the only source"
    flip(tmp_path / "first" / TRAIN_FILE)
    (message,) = problems(tmp_path / "out", tmp_path / "first")
    assert f"{tmp_path}/first/{TRAIN_FILE} has SHA-256" in message
    assert not (tmp_path / "out").exists()


class Meddler(Progress):
    """Somebody who writes to the sources between two passes."""

    def __init__(self, phase: str, act: Callable[[], object]) -> None:
        super().__init__()
        self.watched, self.act = phase, act

    def phase(self, name: str, total_bytes: int) -> None:
        if name.startswith(self.watched):
            self.act()
        super().phase(name, total_bytes)


@pytest.mark.parametrize("phase", ["BPE training", "encoded"])
@pytest.mark.parametrize("change", ["edited", "gone", "longer list"])
def test_sources_that_change_meanwhile_are_noticed(texts: Path, tmp_path: Path, phase: str, change: str) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "line {i}"}}\n' for i in range(9)))
    acts: dict[str, Callable[[], object]] = {
        "edited": lambda: (texts / "010.txt").write_text("other"),
        "gone": lambda: (texts / "010.txt").unlink(),
        "longer list": lambda: lines.write_text(lines.read_text() + '{"text": "one more"}\n'),
    }
    config = DataConfig(source=(f"{texts}/*.txt", str(lines)), val_fraction=0.3, tokenizer=BPE)
    with pytest.raises(ConfigError) as caught:
        prepare(config, tmp_path / "out", progress=Meddler(phase, acts[change]))
    assert "the sources changed while they were read" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["lines.jsonl", "texts"]


def test_progress_is_plain_lines_with_share_and_rate(
    glob: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(DataConfig(source=(glob,), val_fraction=0.3), tmp_path / "out", progress=Progress(every_s=0.0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 120
    assert all(line.startswith("prepare: ") and line.endswith(" MB/s") for line in lines)
    assert "(100 %), 60 documents" in lines[59]
    assert "encoded" in lines[60]
    assert "(100 %), 60 documents" in lines[119]
