"""Batches: which tokens a step reads, whoever asks, however often, however the batch is cut."""

from __future__ import annotations

import itertools
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import ConfigError
from engine.data.dataset import TokenDataset, epoch_order
from engine.data.meta import TRAIN_FILE, VAL_FILE

MakeFolder = Callable[..., Path]
Program = Callable[..., subprocess.CompletedProcess[str]]
SEQ_LEN, WINDOWS = 8, 50
TRAIN_TOKENS = np.random.default_rng(0).permutation(WINDOWS * SEQ_LEN + 5)
"""Every token id occurs once, so the tokens of a batch say where they come from; the last 4 fill no window."""
VAL_TOKENS = np.arange(40_000, 40_000 + 20 * SEQ_LEN + 1)


@pytest.fixture
def data(make_folder: MakeFolder) -> TokenDataset:
    return TokenDataset(make_folder("corpus", TRAIN_TOKENS, VAL_TOKENS), expected_digest=None)


def batch(
    data: TokenDataset, step: int, *, seed: int = 1, micro: int = 0, local: int = 4, total: int = 4, **ranks: int
) -> torch.Tensor:
    """Inputs of one micro-batch; the targets are checked on the way."""
    inputs, targets = data.train_batch(
        seed, step, micro_batch=micro, local_batch_size=local, global_batch_size=total, seq_len=SEQ_LEN, **ranks
    )
    for tensor in (inputs, targets):
        assert tensor.shape == (local, SEQ_LEN)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    return inputs


def window_numbers(inputs: torch.Tensor) -> list[int]:
    """Say which window each row is, and that it is that window whole."""
    starts = [int(np.flatnonzero(row[0].item() == TRAIN_TOKENS)[0]) for row in inputs]
    for start, row in zip(starts, inputs, strict=True):
        assert start % SEQ_LEN == 0
        assert row.tolist() == TRAIN_TOKENS[start : start + SEQ_LEN].tolist()
    return [start // SEQ_LEN for start in starts]


def philox4x64_10(key: tuple[int, int], counter: int) -> list[int]:
    """Philox-4x64-10 (Salmon et al. 2011) in plain integers: four words of one counter."""
    mask = 2**64 - 1
    c, (k0, k1) = [counter, 0, 0, 0], key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(right >> 64) ^ c[1] ^ k0, right & mask, (left >> 64) ^ c[3] ^ k1, left & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c


@pytest.mark.parametrize(("seed", "epoch", "windows"), [(0, 0, 1), (1, 0, 50), (1, 1, 50), (2**63 - 1, 7, 1001)])
def test_order_is_the_rank_of_philox_words(seed: int, epoch: int, windows: int) -> None:
    blocks = (philox4x64_10((seed, epoch), counter) for counter in itertools.count(1))
    words = list(itertools.islice(itertools.chain.from_iterable(blocks), windows))
    assert epoch_order(seed, epoch, windows).tolist() == sorted(range(windows), key=words.__getitem__)


def test_target_of_a_windows_last_token_is_the_next_windows_first(data: TokenDataset) -> None:
    inputs, targets = data.train_batch(
        1, 1, micro_batch=0, local_batch_size=WINDOWS, global_batch_size=WINDOWS, seq_len=SEQ_LEN
    )
    for number, last in zip(window_numbers(inputs), targets[:, -1].tolist(), strict=True):
        assert last == TRAIN_TOKENS[(number + 1) * SEQ_LEN]


def test_every_epoch_visits_each_window_once_in_its_own_order(data: TokenDataset) -> None:
    read = [n for step in range(1, 38 + 1) for n in window_numbers(batch(data, step))]
    epochs = [read[i * WINDOWS : (i + 1) * WINDOWS] for i in range(3)]  # epochs end in the middle of a batch
    assert all(sorted(epoch) == list(range(WINDOWS)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert read[3 * WINDOWS :] == epoch_order(1, 3, WINDOWS)[:2].tolist()


def test_batch_larger_than_the_corpus_goes_round(data: TokenDataset) -> None:
    inputs = batch(data, 1, local=2 * WINDOWS + 3, total=2 * WINDOWS + 3)
    read = window_numbers(inputs)
    assert sorted(read[:WINDOWS]) == sorted(read[WINDOWS : 2 * WINDOWS]) == list(range(WINDOWS))


def test_seeds_read_other_windows(data: TokenDataset) -> None:
    first = {seed: tuple(window_numbers(batch(data, 1, seed=seed))) for seed in (0, 1, 2, 2**32, 2**63 - 1)}
    assert len(set(first.values())) == len(first)


def test_every_cut_of_the_global_batch_gives_the_same_tokens(data: TokenDataset) -> None:
    for step in (1, 2, 9):  # 9 x 12 > 2 x 50: beyond the second epoch
        whole = batch(data, step, local=12, total=12)
        for local, world_size in [(1, 1), (3, 1), (4, 1), (6, 2), (2, 3), (1, 12), (1, 4), (2, 2)]:
            parts = [
                batch(data, step, micro=m, local=local, total=12, rank=rank, world_size=world_size)
                for m in range(12 // (local * world_size))
                for rank in range(world_size)
            ]
            assert torch.equal(torch.cat(parts), whole), (step, local, world_size)


def test_attempt_that_starts_in_the_middle_reads_the_same(data: TokenDataset) -> None:
    unbroken = {step: batch(data, step) for step in range(1, 41)}
    for steps in (range(23, 41), (40, 2, 13, 39, 2)):
        epoch_order.cache_clear()
        attempt = TokenDataset(data.path, expected_digest=data.digest)
        for step in steps:
            halves = [batch(attempt, step, micro=micro, local=2) for micro in (0, 1)]
            assert torch.equal(torch.cat(halves), unbroken[step]), step


def test_validation_is_spread_over_the_held_out_split_and_always_the_same(data: TokenDataset) -> None:
    assert data.num_val_windows(SEQ_LEN) == 20
    starts = []
    for index in range(3):
        inputs, targets = data.val_batch(index, local_batch_size=3, seq_len=SEQ_LEN, num_batches=3)
        again, _ = data.val_batch(index, local_batch_size=3, seq_len=SEQ_LEN, num_batches=3)
        assert torch.equal(inputs, again)
        assert torch.equal(inputs + 1, targets)
        starts += ((inputs[:, 0] - 40_000) // SEQ_LEN).tolist()
    assert starts == [i * 20 // 9 for i in range(9)]


def test_validation_of_all_windows_visits_each_once(data: TokenDataset) -> None:
    rows = [data.val_batch(i, local_batch_size=5, seq_len=SEQ_LEN, num_batches=4)[0] for i in range(4)]
    assert torch.cat(rows).flatten().tolist() == VAL_TOKENS[:-1].tolist()


def test_no_training_batch_holds_a_held_out_document(texts: Path, program: Program, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert program("--source", f"{texts}/*.txt", "--val-fraction", "0.3", "--out", out).returncode == 0
    data = TokenDataset(out, expected_digest=None)
    windows, val_windows = data.num_train_windows(32), data.num_val_windows(32)
    one = {"local_batch_size": 1, "seq_len": 32}
    rows = [data.train_batch(5, step, micro_batch=0, global_batch_size=1, **one)[0] for step in range(1, windows + 1)]
    val_rows = [data.val_batch(index, num_batches=val_windows, **one)[0] for index in range(val_windows)]
    in_order = [rows[step] for step in np.argsort(epoch_order(5, 0, windows))]
    texts_read = [bytes(torch.cat(split).flatten().tolist()) for split in (in_order, val_rows)]
    train, val = ({n for n in range(60) if f"berschrift {n} ".encode() in text} for text in texts_read)
    assert len(train) + len(val) >= 58  # the last tokens of a split may fill no window
    assert train
    assert val
    assert not train & val


def test_shards_are_mapped_not_read(make_folder: MakeFolder) -> None:
    path = make_folder("corpus", TRAIN_TOKENS, VAL_TOKENS, sparse_train_tokens=1 << 28)
    assert (path / TRAIN_FILE).stat().st_size == 1 << 29
    tracemalloc.start()
    try:
        data = TokenDataset(path, expected_digest=None)
        inputs, _ = data.train_batch(1, 1, micro_batch=0, local_batch_size=2, global_batch_size=2, seq_len=1 << 16)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert inputs.shape == (2, 1 << 16)
    assert peak_bytes < 20 << 20


def test_writing_into_a_batch_changes_no_shard(data: TokenDataset) -> None:
    before = (data.path / TRAIN_FILE).read_bytes()
    inputs = batch(data, 1)
    kept = inputs.clone()
    inputs.zero_()
    assert (data.path / TRAIN_FILE).read_bytes() == before
    assert torch.equal(batch(data, 1), kept)


def test_large_vocabulary_is_four_bytes_a_token(make_folder: MakeFolder) -> None:
    tokens = np.arange(100_000, 100_000 + 5 * SEQ_LEN)
    data = TokenDataset(make_folder("wide", tokens, tokens, vocab_size=200_000), expected_digest=None)
    assert data.meta.dtype == "uint32"
    inputs, _ = data.val_batch(0, local_batch_size=4, seq_len=SEQ_LEN, num_batches=1)
    assert inputs.flatten().tolist() == tokens[: 4 * SEQ_LEN].tolist()


def test_bad_arguments_are_named_all_at_once(data: TokenDataset) -> None:
    with pytest.raises(ConfigError) as caught:
        data.train_batch(
            -1, 0, micro_batch=2, local_batch_size=3, global_batch_size=8, seq_len=10_000, rank=2, world_size=2
        )
    assert [".".join(map(str, p.path)) for p in caught.value.problems] == [
        "training.global_batch_size", "step", "seed", "rank", "micro_batch", "training.seq_len",
    ]  # fmt: skip
    message = str(caught.value)
    assert "8 is not divisible by local_batch_size 3 x world_size 2" in message
    assert "step: 0 is out of range; expected at least 1" in message
    assert "has 405 tokens; a window is seq_len + 1 = 10001" in message


@pytest.mark.parametrize(
    ("index", "num_batches", "seq_len", "expected"),
    [
        (4, 4, SEQ_LEN, "index: 4 is out of range; expected 0 .. 3"),
        (-1, 4, SEQ_LEN, "index: -1 is out of range"),
        (0, 11, SEQ_LEN, "needs 22 windows of 8 tokens (batches x local_batch_size); the held-out split has 20"),
        (0, 1, 500, "the validation split of"),
    ],
)
def test_bad_validation_arguments_are_refused(
    data: TokenDataset, index: int, num_batches: int, seq_len: int, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        data.val_batch(index, local_batch_size=2, seq_len=seq_len, num_batches=num_batches)
    assert expected in str(caught.value)


def test_check_says_everything_that_does_not_fit(data: TokenDataset) -> None:
    fits = {"seq_len": SEQ_LEN, "local_batch_size": 4, "global_batch_size": 8, "val_batches": 5}
    data.check(**fits, model_vocab_size=1 << 16)
    with pytest.raises(ConfigError) as caught:
        data.check(seq_len=SEQ_LEN, local_batch_size=3, global_batch_size=8, val_batches=7, model_vocab_size=256)
    assert [".".join(map(str, p.path)) for p in caught.value.problems] == [
        "model.vocab_size", "training.global_batch_size", "validation.batches",
    ]  # fmt: skip
    assert "lower validation.batches to at most 6, or hold out more" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        data.check(seq_len=1000, local_batch_size=1, global_batch_size=1, val_batches=1, model_vocab_size=1 << 16)
    assert [p.path for p in caught.value.problems] == [("training", "seq_len")] * 2


def test_other_corpus_is_refused_by_its_digest(data: TokenDataset) -> None:
    assert TokenDataset(data.path, expected_digest=data.digest).digest == data.digest
    with pytest.raises(ConfigError) as caught:
        TokenDataset(data.path, expected_digest="0123456789abcdef")
    assert f"{data.path} holds corpus {data.digest}; this run was launched with 0123456789abcdef" in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda p: (p / TRAIN_FILE).write_bytes(b""), f"{TRAIN_FILE} has 0 bytes; meta.json says 810"),
        (lambda p: (p / VAL_FILE).unlink(), f"{VAL_FILE} is missing"),
        (lambda p: (p / "meta.json").unlink(), "has no meta.json; expected a folder made by `lptctl data prepare`"),
        (lambda p: (p / "meta.json").write_text("{"), "meta.json is no JSON"),
        (lambda p: (p / "meta.json").write_bytes(b"\xff"), "meta.json is no JSON"),
        (lambda p: (p / "meta.json").write_text("[]"), "has layout version None; this engine reads 1"),
        (lambda p: edit_meta(p, '"dtype": "uint16"', '"dtype": "uint32"'), "meta.json was edited: it says digest"),
        (lambda p: edit_meta(p, '"n_train_tokens": 405', '"n_train_tokens": 404'), "does not hold 404 tokens"),
        (lambda p: edit_meta(p, '"separator": 0', '"separator": "0"'), 'meta.json: separator: '),
    ],
)  # fmt: skip
def test_damaged_folder_says_what_is_wrong(data: TokenDataset, damage: Callable[[Path], None], expected: str) -> None:
    damage(data.path)
    with pytest.raises(ConfigError) as caught:
        TokenDataset(data.path, expected_digest=None)
    assert expected in str(caught.value)


def edit_meta(folder: Path, before: str, after: str) -> None:
    text = (folder / "meta.json").read_text()
    assert before in text
    (folder / "meta.json").write_text(text.replace(before, after))


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist; expected a folder made by"):
        TokenDataset(tmp_path / "nowhere", expected_digest=None)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="file is no folder"):
        TokenDataset(tmp_path / "file", expected_digest=None)


def test_verify_finds_a_flipped_bit(data: TokenDataset) -> None:
    data.verify()
    raw = bytearray((data.path / VAL_FILE).read_bytes())
    raw[17] ^= 1
    (data.path / VAL_FILE).write_bytes(raw)
    with pytest.raises(ConfigError, match=f"{VAL_FILE} has SHA-256"):
        TokenDataset(data.path, expected_digest=data.digest).verify()
