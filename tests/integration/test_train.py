"""The engine as a program: kills, stops, non-finite numbers, damaged files."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path

import pytest

from engine.config import CLOCK_FIELDS, RunPaths
from tests.helpers.runs import (
    events,
    make_config,
    make_run,
    prepare_corpus,
    records,
    run_engine,
    start_engine,
    stitched,
)

LONG = {"training": {"steps": 60}, "checkpoint": {"every": 7, "keep": 2}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def unbroken(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    paths = make_run(tmp_path_factory.mktemp("unbroken"), make_config(corpus, **LONG))
    code, output = run_engine(paths)
    assert code == 0, output
    return paths


def without_clock(record: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in record.items() if k not in CLOCK_FIELDS}


def assert_same_series(paths: RunPaths, reference: RunPaths) -> None:
    """Same stitched series in every field but the clock's, no torn line, steps run twice equal exactly."""
    for log in (paths.metrics, paths.events):
        assert log.read_bytes().endswith(b"\n")
        for line in log.read_text().splitlines():
            json.loads(line)
    got, want = stitched(paths), stitched(reference)
    assert got.keys() == want.keys()
    for step, record in want.items():
        assert without_clock(got[step]) == without_clock(record), f"step {step}"
    seen: dict[int, dict[str, object]] = {}
    for record in map(without_clock, records(paths)):
        step = int(str(record["step"]))
        assert seen.setdefault(step, record) == record, f"step {step} differs between attempts"


def kill_at_random(paths: RunPaths, rng: random.Random, *, window_s: float) -> None:
    process = start_engine(paths)
    time.sleep(rng.uniform(0.0, window_s))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


def run_time_s(paths: RunPaths) -> float:
    started = events(paths, "started")[0]["time"]
    return float(events(paths, "exit")[0]["time"] - started) + 6.0  # start-up: imports of torch


def test_run_writes_what_the_contract_says(unbroken: RunPaths) -> None:
    series = stitched(unbroken)
    assert list(series) == list(range(61))
    assert series[0]["loss"] is None
    assert series[0]["val_loss"] == pytest.approx(5.545, abs=0.1)  # ln 256
    assert series[60]["loss"] < 0.75 * series[1]["loss"]
    assert series[60]["val_loss"] < series[0]["val_loss"]
    assert all(r["nonfinite_blocks"] == 0 for s, r in series.items() if s)
    (started,) = events(unbroken, "started")
    assert started["resumed_from"] == 0
    assert started["quantised_layers"]
    assert re.fullmatch(r"[0-9a-f]{16}", started["init_digest"])
    (ended,) = events(unbroken, "exit")
    assert (ended["code"], ended["cause"], ended["step"]) == (0, "finished", 60)
    counts = ended["gemms"]
    assert set(counts) == set(started["quantised_layers"])
    assert all(c == {"fprop": 60, "dgrad": 60, "wgrad": 60} for c in counts.values())
    assert sorted(p.name for p in unbroken.checkpoints.iterdir()) == ["step-00000056", "step-00000060"]


def test_sigkill_at_random_moments_leaves_the_same_series(corpus: Path, unbroken: RunPaths, tmp_path: Path) -> None:
    rng = random.Random(7)
    paths = make_run(tmp_path / "run", make_config(corpus, **LONG))
    for _ in range(3):
        kill_at_random(paths, rng, window_s=run_time_s(unbroken))
    code, output = run_engine(paths)
    assert code == 0, output
    assert_same_series(paths, unbroken)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_sigkill_soak(corpus: Path, unbroken: RunPaths, tmp_path: Path, seed: int) -> None:
    """Five random kills a run, four runs: twenty moments."""
    rng = random.Random(seed)
    paths = make_run(tmp_path / "run", make_config(corpus, **LONG))
    for _ in range(5):
        kill_at_random(paths, rng, window_s=run_time_s(unbroken))
    code, output = run_engine(paths)
    assert code == 0, output
    assert_same_series(paths, unbroken)


@pytest.mark.parametrize("how", ["stop file", signal.SIGTERM, signal.SIGUSR1])
def test_clean_stop_checkpoints_and_continues_exactly(
    corpus: Path, unbroken: RunPaths, tmp_path: Path, how: str | signal.Signals
) -> None:
    paths = make_run(tmp_path / "run", make_config(corpus, **LONG))
    process = start_engine(paths)
    deadline = time.time() + 60
    while not any(r["step"] >= 2 for r in records(paths)):
        assert time.time() < deadline
        time.sleep(0.02)
    if isinstance(how, signal.Signals):
        process.send_signal(how)
    else:
        paths.stop.touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    stopped_at = events(paths, "exit")[-1]["step"]
    assert stopped_at < 60
    assert events(paths, "checkpoint")[-1]["step"] == stopped_at
    paths.stop.unlink(missing_ok=True)
    assert run_engine(paths)[0] == 0
    assert events(paths, "started")[-1]["resumed_from"] == stopped_at
    assert_same_series(paths, unbroken)


def test_nonfinite_stops_with_70_and_no_checkpoint(corpus: Path, tmp_path: Path) -> None:
    config = make_config(
        corpus,
        recipe="bf16",
        optimizer={"lr": 1e30, "max_grad_norm": None, "warmup_fraction": 0.0},
        checkpoint={"every": 1},
    )
    paths = make_run(tmp_path / "run", config)
    code, output = run_engine(paths)
    assert code == 70, output
    (event,) = events(paths, "nonfinite")
    bad = event["step"]
    last = records(paths)[-1]
    assert last["step"] == bad
    assert last["loss"] != last["loss"] or last["grad_norm"] != last["grad_norm"] or last["grad_norm"] == float("inf")
    assert all(e["step"] < bad for e in events(paths, "checkpoint"))
    assert events(paths, "exit")[-1]["cause"] == "nonfinite"


def test_damaged_newest_checkpoint_falls_back_with_an_event(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus)
    reference = make_run(tmp_path / "reference", config)
    assert run_engine(reference)[0] == 0
    paths = make_run(tmp_path / "run", config)
    assert run_engine(paths)[0] == 0
    newest = paths.checkpoints / "step-00000012" / "state.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    assert run_engine(paths)[0] == 0
    (event,) = events(paths, "checkpoint_unreadable")
    assert event["step"] == 12
    assert events(paths, "started")[-1]["resumed_from"] == 9
    assert_same_series(paths, reference)


def test_torn_last_line_is_cut_and_reported(corpus: Path, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", make_config(corpus))
    assert run_engine(paths)[0] == 0
    with paths.metrics.open("a") as file:
        file.write('{"step": 13, "att')
    assert run_engine(paths)[0] == 0
    assert events(paths, "torn_tail")[-1] | {"file": "metrics.jsonl", "bytes": 17} == events(paths, "torn_tail")[-1]
    assert paths.metrics.read_bytes().endswith(b"\n")


def test_a_live_run_is_not_run_twice(corpus: Path, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", make_config(corpus, training={"steps": 5000}))
    first = start_engine(paths)
    try:
        deadline = time.time() + 60
        while not events(paths, "started"):
            assert time.time() < deadline
            time.sleep(0.05)
        code, output = run_engine(paths)
        assert code == 1
        assert str(first.pid) in output
        assert len(events(paths, "started")) == 1
    finally:
        first.kill()
        first.communicate()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data": {"digest": "0" * 16}}, "0000000000000000"),
        ({"data": {"path": "/nowhere/at all"}}, "/nowhere/at all"),
        ({"recipe": {"targets": ["nothing.*"]}}, 'recipe.targets.0: "nothing.*" matches no Linear layer'),
        ({"training": {"seq_len": 100_000_000 // 32 * 32}}, "tokens"),
    ],
    ids=["other corpus", "missing corpus", "targets match nothing", "corpus too small"],
)
def test_bad_configuration_is_exit_64_with_the_reason(
    corpus: Path, tmp_path: Path, change: dict[str, dict[str, object]], expected: str
) -> None:
    paths = make_run(tmp_path / "run", make_config(corpus))
    tree = json.loads(paths.run_json.read_text())
    for section, values in change.items():
        tree[section].update(values)
    paths.run_json.write_text(json.dumps(tree))
    code, output = run_engine(paths)
    assert code == 64, output
    assert expected in output
    assert "Traceback" not in output
    assert events(paths, "exit")[-1]["cause"] == "config"


def test_broken_run_json_is_exit_64(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.run_json.write_text('{"sweep": "x", "steps": ')
    code, output = run_engine(paths)
    assert code == 64
    assert "run.json is no JSON" in output


def test_paired_runs_share_weights_and_batches(corpus: Path, tmp_path: Path) -> None:
    starts = {}
    for recipe, seed in (("bf16", 1), ("lpt", 1), ("lpt", 2)):
        config = make_config(corpus, recipe=recipe, seed=seed, training={"steps": 1})
        paths = make_run(tmp_path / f"{recipe}-{seed}", config)
        code, output = run_engine(paths)
        assert code == 0, output
        starts[recipe, seed] = events(paths, "started")[0]
        assert starts[recipe, seed]["init_digest"] in output
        assert starts[recipe, seed]["data_digest"] in output
    for digest in ("init_digest", "batch_digest"):
        assert starts["bf16", 1][digest] == starts["lpt", 1][digest]
        assert starts["lpt", 2][digest] != starts["lpt", 1][digest]


def test_stdout_has_torchtitans_grammar(corpus: Path, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", make_config(corpus))
    _, output = run_engine(paths)
    train = re.findall(
        r"^step:\s*(\d+)  loss:\s*([-+\w.]+)  grad_norm:\s*([-+\w.]+)  memory:\s*[\d.]+GiB\([\d.]+%\)  "
        r"tps: [\d,]+  tflops: [\d,.]+  mfu: (?:N/A|[\d.]+%)$",
        output,
        re.M,
    )
    assert [int(step) for step, _, _ in train] == list(range(1, 13))
    for step, loss, norm in train:
        record = stitched(paths)[int(step)]
        assert float(loss) == pytest.approx(record["loss"], abs=5e-6)
        assert float(norm) == pytest.approx(record["grad_norm"], abs=5e-5)
    validation = re.findall(r"^validate step: (\d+)  loss:\s*([-+\w.]+)", output, re.M)
    assert [int(step) for step, _ in validation] == [0, 4, 8, 12]


def test_gradient_accumulation_gives_the_same_curve(corpus: Path, tmp_path: Path) -> None:
    curves = []
    for local in (4, 1):
        config = make_config(corpus, recipe="bf16", training={"local_batch_size": local})
        paths = make_run(tmp_path / f"local-{local}", config)
        assert run_engine(paths)[0] == 0
        curves.append([r["loss"] for s, r in stitched(paths).items() if s])
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def test_tensorboard_holds_the_series(corpus: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    paths = make_run(tmp_path / "run", make_config(corpus, runtime={"tensorboard": True}))
    assert run_engine(paths)[0] == 0
    reader = EventAccumulator(str(paths.tb(1)), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    series = stitched(paths)
    for tag, key in (("loss_metrics/global_avg_loss", "loss"), ("grad_norm", "grad_norm")):
        values = {e.step: e.value for e in reader.Scalars(tag)}
        assert values == pytest.approx({s: r[key] for s, r in series.items() if s}, rel=1e-6)
    assert [e.step for e in reader.Scalars("validation_metrics/loss")] == [0, 4, 8, 12]
