"""The two tokenisers: bytes, and a byte-level BPE trained on the corpus. numpy, and tokenizers for the BPE only."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endofdocument|>"
"""The BPE's only special token, id 0; ends each document. In a document's text it is ordinary text."""

CHUNK_CHARS = 1 << 20
_SAFE_CUT = re.compile(r"[!-~](?:\n(?=[!-~])|(?= [!-~]))")


class Tokenizer(Protocol):
    """What ``prepare`` needs of a tokeniser."""

    vocab_size: int
    separator: int

    def encode(self, documents: Sequence[bytes]) -> npt.NDArray[np.integer]:
        """Return the token ids of the documents, each followed by the separator: one flat array."""

    def definition(self) -> bytes | None:
        """Return the bytes of ``tokenizer.json``, or None where the name says it all."""


class ByteTokenizer:
    """Token id = byte value. Byte 0 separates documents, so a document must not contain it."""

    vocab_size = 256
    separator = 0

    def encode(self, documents: Sequence[bytes]) -> npt.NDArray[np.integer]:
        """Return the bytes of the documents, a 0 after each."""
        return np.frombuffer(b"".join(part for document in documents for part in (document, b"\0")), dtype=np.uint8)

    def definition(self) -> bytes | None:
        """Return None: there is nothing to store."""
        return None


class BpeTokenizer:
    """Byte-level BPE (GPT-2's pre-tokeniser and byte alphabet, no normaliser): any text survives a round trip."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A document that quotes the special token must not end there.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = tokenizer.get_vocab_size()
        separator = tokenizer.token_to_id(END_OF_DOCUMENT)
        if separator is None:
            raise ValueError(f"the tokeniser has no {END_OF_DOCUMENT} token; expected one made by `prepare`")
        self.separator: int = separator

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
        """Train on documents; the same documents give the same vocabulary, whatever the number of threads."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,  # merging a pair that occurs once learns that one place by heart
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        with _interruptible():
            tokenizer.train_from_iterator((chunk for d in documents for chunk in chunks(d.decode())), trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> BpeTokenizer:
        """Read a ``tokenizer.json`` that ``prepare`` wrote."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(path)))

    def encode(self, documents: Sequence[bytes]) -> npt.NDArray[np.integer]:
        """Return the token ids of the documents, the end-of-document token after each."""
        pieces = [list(chunks(document.decode())) for document in documents]
        encoded = iter(self._tokenizer.encode_batch_fast([c for p in pieces for c in p], add_special_tokens=False))
        ids: list[int] = []
        for piece in pieces:
            for _ in piece:
                ids += next(encoded).ids
            ids.append(self.separator)
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids of one document, separator left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def definition(self) -> bytes | None:
        """Return the text of ``tokenizer.json``."""
        return self._tokenizer.to_str(pretty=True).encode()


def chunks(text: str) -> Iterator[str]:
    """Cut a long text where the pre-tokeniser cuts anyway, so that memory stays bounded and no token changes.

    Between two visible ASCII characters, GPT-2's pattern makes a single line break a token and starts one at a single
    space.
    """
    start = 0
    while len(text) - start > CHUNK_CHARS:
        cut = _SAFE_CUT.search(text, start + CHUNK_CHARS)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once: the merges run outside Python, whose own handler would wait for their end."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # somebody else decides what Ctrl-C means
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
