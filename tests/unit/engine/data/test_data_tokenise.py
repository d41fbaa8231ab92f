"""Tokenisers: lossless, deterministic, and blind to how a text is cut."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.data import tokenise
from engine.data.tokenise import END_OF_DOCUMENT, BpeTokenizer, ByteTokenizer

SAMPLE = [
    Path(tokenise.__file__).read_bytes(),
    Path(__file__).read_bytes(),
    "Übergröße, naïve café 🦉🦉\r\n".encode() * 9,
]


@pytest.fixture(scope="module")
def bpe() -> BpeTokenizer:
    return BpeTokenizer.train(SAMPLE, 400)


def test_byte_tokens_are_the_bytes_with_a_zero_after_each_document() -> None:
    tokens = ByteTokenizer().encode(["aü".encode(), b"", b"b"])
    assert tokens.tolist() == [97, 0xC3, 0xBC, 0, 0, 98, 0]
    assert ByteTokenizer().definition() is None


def test_bpe_has_the_size_asked_for_and_compresses(bpe: BpeTokenizer) -> None:
    assert bpe.vocab_size == 400
    tokens = bpe.encode(SAMPLE)
    assert tokens.max() < 400
    assert len(tokens) < 0.6 * sum(map(len, SAMPLE))
    assert (tokens == bpe.separator).sum() == len(SAMPLE)
    assert tokens[-1] == bpe.separator


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_bpe_round_trips_any_text(bpe: BpeTokenizer, text: str) -> None:
    tokens = bpe.encode([text.encode()])
    assert tokens[-1] == bpe.separator
    assert bpe.decode(tokens[:-1].tolist()) == text


@pytest.mark.parametrize(
    "text",
    [
        END_OF_DOCUMENT,
        f"a {END_OF_DOCUMENT} b",
        " leading",
        "trailing  \n",
        "\r\n\r\n",
        "\0\x01",
        "a\u0301 vs \u00e1",
        "\ufeff",
    ],
)
def test_bpe_round_trips_awkward_text_without_an_early_end(bpe: BpeTokenizer, text: str) -> None:
    tokens = bpe.encode([text.encode(), b"next"])
    assert (tokens == bpe.separator).sum() == 2
    end = int(np.flatnonzero(tokens == bpe.separator)[0])
    assert bpe.decode(tokens[:end].tolist()) == text


def test_bpe_survives_saving(bpe: BpeTokenizer, tmp_path: Path) -> None:
    definition = bpe.definition()
    assert definition is not None
    (tmp_path / "tokenizer.json").write_bytes(definition)
    loaded = BpeTokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.definition() == definition
    quoted = [*SAMPLE, f"x{END_OF_DOCUMENT}".encode()]
    assert loaded.encode(quoted).tolist() == bpe.encode(quoted).tolist()


def test_bpe_does_not_depend_on_threads(program_env: dict[str, str], bpe: BpeTokenizer) -> None:
    code = (
        "import hashlib, sys; from pathlib import Path; from engine.data.tokenise import BpeTokenizer\n"
        "texts = [Path(a).read_bytes() for a in sys.argv[1:]]\n"
        "texts.append('Übergröße, naïve café 🦉🦉\\r\\n'.encode() * 9)\n"
        "print(hashlib.sha256(BpeTokenizer.train(texts, 400).definition()).hexdigest())"
    )
    command = [sys.executable, "-c", code, tokenise.__file__, __file__]
    definition = bpe.definition()
    assert definition is not None
    found = {hashlib.sha256(definition).hexdigest()}
    for threads in ("1", "3"):
        env = {**program_env, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        found.add(result.stdout.strip())
    assert len(found) == 1


def test_foreign_tokenizer_file_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="expected one made by `prepare`"):
        BpeTokenizer.load(tmp_path / "tokenizer.json")


def test_cutting_a_long_text_changes_no_token(bpe: BpeTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [s.decode() for s in SAMPLE] + ["a\nb\n\nc \n d\n'tis\n\n\n  x\n\ty\n1\n2\r\n3\n"] * 3
    text = "".join(parts)
    monkeypatch.setattr(tokenise, "CHUNK_CHARS", len(text))
    assert list(tokenise.chunks(text)) == [text]
    whole = bpe.encode([text.encode()]).tolist()
    for size in (1, 2, 7, 50, 1000):
        monkeypatch.setattr(tokenise, "CHUNK_CHARS", size)
        cut = list(tokenise.chunks(text))
        assert "".join(cut) == text
        assert len(cut) > min(100, len(text) // size // 4)
        assert bpe.encode([text.encode()]).tolist() == whole


def test_text_without_a_safe_place_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "CHUNK_CHARS", 4)
    assert list(tokenise.chunks("ohne-Lücke")) == ["ohne-Lücke"]
    assert list(tokenise.chunks("blank\n\nlines\n \n")) == ["blank\n\nlines\n \n"]
    assert list(tokenise.chunks("")) == [""]
