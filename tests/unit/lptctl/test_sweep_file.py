# ruff: noqa: E501 - the expected messages are easier to read whole
"""Sweep files: expansion, run ids, pairing, and every error with its line, source and caret."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import canonical_json
from lptctl.errors import UsageError
from lptctl.expand import Expansion, expand_file
from lptctl.spec import load_sweep_file

HEAD = """\
version: 1
name: t
base:
  model: llama3_nano
  training: {steps: 20, seq_len: 64, global_batch_size: 8, local_batch_size: 8}
"""


def expand(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> Expansion:
    path = folder / "s.yaml"
    path.write_text(text, encoding="utf-8")
    return expand_file(load_sweep_file(path), overrides)


def error(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UsageError) as caught:
        expand(folder, text, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(folder), "")


def test_grid_is_the_product_in_file_order(tmp_path: Path) -> None:
    runs = expand(tmp_path, HEAD + "sweep: {grid: {recipe: [bf16, lpt], seed: [1, 2]}}\n").runs
    assert [(r.config.recipe.name, r.config.seed) for r in runs] == [("bf16", 1), ("bf16", 2), ("lpt", 1), ("lpt", 2)]
    assert [r.config.run_id.rsplit("-", 1)[0] for r in runs] == ["bf16-s1", "bf16-s2", "lpt-s1", "lpt-s2"]
    for run in runs:
        assert run.config.run_id.endswith(run.config.identity_hash())


def test_zip_moves_together_include_adds_exclude_removes(tmp_path: Path) -> None:
    text = HEAD + (
        "sweep:\n"
        "  grid: {recipe: [bf16, lpt], seed: 1}\n"
        "  zip: [{optimizer.lr: [1e-3, 2e-3], optimizer.eps: [1e-8, 1e-7]}]\n"
        "  exclude: [{recipe: lpt, optimizer.lr: 2e-3}]\n"
        "  include: [{recipe: lpt, seed: 1, recipe.scale_mode: uos}]\n"
    )
    expansion = expand(tmp_path, text)
    got = [(r.config.recipe.name, r.config.seed, r.config.optimizer.lr, r.config.optimizer.eps) for r in expansion.runs]
    assert got == [
        ("bf16", 1, 1e-3, 1e-8),
        ("bf16", 1, 2e-3, 1e-7),
        ("lpt", 1, 1e-3, 1e-8),
        ("lpt", 1, 1e-3, 1e-8),
    ]
    assert expansion.runs[-1].config.recipe.switches.scale_mode == "uos"
    assert "1 run of bf16 without a partner: in the curves, but not in paired differences" in expansion.notes


def test_union_merges_duplicates_and_counts_them(tmp_path: Path) -> None:
    text = HEAD + (
        "sweep:\n  - {grid: {recipe: [bf16, lpt], seed: [1]}}\n  - {grid: {recipe: [lpt_recipe, uos], seed: [1]}}\n"
    )
    expansion = expand(tmp_path, text)
    assert [r.config.recipe.name for r in expansion.runs] == ["bf16", "lpt", "uos"]
    assert "1 duplicate point merged" in expansion.notes


def test_precedence_is_base_sweep_set(tmp_path: Path) -> None:
    text = HEAD.replace("base:\n", "base:\n  optimizer.lr: 1e-4\n  seed: 1\n") + (
        "sweep: {grid: {recipe: [bf16], optimizer.lr: [4e-4]}}\n"
    )
    expansion = expand(tmp_path, text)
    assert expansion.runs[0].config.optimizer.lr == 4e-4
    assert any("optimizer.lr is set in base and swept" in n for n in expansion.notes)
    assert expand(tmp_path, text, ("optimizer.lr=5e-4",)).runs[0].config.optimizer.lr == 5e-4


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    seeds=st.integers(1, 3),
)
@settings(max_examples=20, deadline=None)
def test_number_of_runs_is_the_product(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seeds: int) -> None:
    keys = ["optimizer.lr", "optimizer.eps", "optimizer.weight_decay"]
    axes = {k: [(i + 1) / 1000 for i in range(n)] for k, n in zip(keys, sizes, strict=False)}
    axes["recipe"], axes["seed"] = ["bf16", "lpt"], list(range(seeds))  # type: ignore[list-item]
    text = HEAD + "sweep: {grid: " + canonical_json(axes).replace(":", ": ") + "}\n"
    runs = expand(tmp_path_factory.mktemp("sweep"), text).runs
    expected = 2 * seeds
    for n in sizes:
        expected *= n
    assert len({r.config.run_id for r in runs}) == len(runs) == expected


def test_run_id_ignores_what_does_not_change_results(tmp_path: Path) -> None:
    sweep = "sweep: {grid: {recipe: [bf16], seed: [1]}}\n"
    first = expand(tmp_path, HEAD + sweep).runs[0].config.run_id
    same = expand(tmp_path, HEAD + sweep, ("checkpoint.every=3", "runtime.threads=2")).runs[0].config.run_id
    other = expand(tmp_path, HEAD + sweep, ("training.steps=21",)).runs[0].config.run_id
    assert first == same != other


SWEEP = "sweep: {grid: {recipe: [bf16, lpt], seed: [1]}}\n"
BAD = {
    "unknown key": (
        HEAD + "sweeps: {}\n" + SWEEP,
        '/s.yaml:6:1: sweeps: unknown key (did you mean "sweep"?)\n  | sweeps: {}\n  | ^',
    ),
    "unknown key in base": (
        HEAD + "  trainin.steps: 3\n" + SWEEP,
        '/s.yaml:6:3: trainin.steps: unknown key (did you mean "training"?)\n  |   trainin.steps: 3\n  |   ^',
    ),
    "unknown nested key": (HEAD + "  optimizer: {lrr: 1e-3}\n" + SWEEP, '/s.yaml:6:15: optimizer.lrr: unknown key (did you mean "lr"?)'),
    "unknown recipe": (
        HEAD + "sweep: {grid: {recipe: [bf16, lptt], seed: [1]}}\n",
        '/s.yaml:6:31: recipe.name: unknown recipe "lptt" [1 of 2 runs, first lptt-s1] (did you mean "lpt"?',
    ),
    "unknown model": (HEAD.replace("nano", "nanoo") + SWEEP, '/s.yaml:4:10: model.name: unknown model "llama3_nanoo" (did you mean "llama3_nano"?'),
    "duplicate key": (HEAD + "name: u\n" + SWEEP, '/s.yaml:6:1: name: duplicate key "name" (first on line 2; keep one)\n  | name: u\n  | ^^^^'),
    "broken YAML": (HEAD + "sweep: {grid: [\n", "no valid YAML"),
    "number as text": (HEAD + '  optimizer.lr: "1e-3"\n' + SWEEP, '/s.yaml:6:17: optimizer.lr: "1e-3" is not a number'),
    "clock time": (
        HEAD + "  optimizer.lr: 4:00:00\n" + SWEEP,
        '/s.yaml:6:17: optimizer.lr: "4:00:00" is not a number (a clock time is text in YAML 1.2, not a number of seconds',
    ),
    "empty list": (HEAD + "sweep: {grid: {recipe: [], seed: [1]}}\n", "/s.yaml:6:16: recipe: empty list"),
    "no grid": (HEAD + "sweep: {grid: {}}\n", "sweep: has no grid, zip or include"),
    "bare string": (HEAD + "sweep: {grid: {recipe: lpt, seed: [1]}}\n", '/s.yaml:6:24: recipe: "lpt" where a list is expected (write [lpt])'),
    "unequal zip": (
        HEAD + "sweep: {grid: {recipe: [bf16], seed: [1]}, zip: [{optimizer.lr: [1, 2], optimizer.eps: [1]}]}\n",
        "sweep.zip: values that move together differ in number: optimizer.lr has 2, optimizer.eps has 1",
    ),
    "steps 0": (HEAD.replace("steps: 20", "steps: 0") + SWEEP, "/s.yaml:5:21: training.steps: 0 must be at least 1"),
    "batch not divisible": (
        HEAD.replace("global_batch_size: 8", "global_batch_size: 10") + SWEEP,
        "/s.yaml:5:57: training.global_batch_size: 10 is not divisible by local_batch_size 8",
    ),
    "batch in one grid value": (
        HEAD + "sweep: {grid: {recipe: [bf16], seed: [1], training.global_batch_size: [8, 12]}}\n",
        "/s.yaml:6:75: training.global_batch_size: 12 is not divisible by local_batch_size 8 [1 of 2 runs, first bf16-s1-global_batch_size12]",
    ),
    "missing text": (HEAD + "  data.source: [a b ü.txt]\n" + SWEEP, '/s.yaml:6:17: data.source: "a b ü.txt" does not exist (looked for '),
    "glob without match": (HEAD + "  data.source: [none/*.txt]\n" + SWEEP, '"none/*.txt" matches no file'),
    "seed missing": (HEAD + "sweep: {grid: {recipe: [bf16]}}\n", "seed: missing: every run needs one (add seed: [1, 2, 3] to grid)"),
    "seed as text": (HEAD + "sweep: {grid: {recipe: [bf16], seed: [one]}}\n", 'seed: "one" is not an integer'),
    "switch that never fires": (
        HEAD + "  recipe.scale_mode_sr: uos6\nsweep: {grid: {recipe: [lpt_nosr], seed: [1]}}\n",
        "/s.yaml:6:25: recipe.scale_mode_sr: never fires without sr: true",
    ),
    "unknown mode": (HEAD + "  recipe.scale_mode: midmaxx\n" + SWEEP, 'did you mean "midmax"?'),
    "vocabulary": (HEAD + "  data.tokenizer: bpe:4096\n" + SWEEP, "model.vocab_size: 256 is smaller than the tokeniser's vocabulary of 4096"),
    "slurm": ("executor: slurm\n" + HEAD + SWEEP, 'executor "slurm" is not available; "local" is the only one so far'),
    "name": (HEAD.replace("name: t", 'name: "a#b c"') + SWEEP, '"a#b c" cannot be a folder name'),
    "filled in": (HEAD + "  data.digest: abc\n" + SWEEP, "data.digest: is filled in at launch"),
    "unpaired": (
        HEAD + "sweep: {include: [{recipe: bf16, seed: 1}, {recipe: lpt, seed: 1, training.steps: 30}]}\n",
        "recipe lpt shares no seed and settings with bf16",
    ),
    "version": (HEAD.replace("version: 1", "version: 2") + SWEEP, "/s.yaml:1:10: version"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_file_says_where_and_what(tmp_path: Path, case: str) -> None:
    text, expected = BAD[case]
    assert expected in error(tmp_path, text)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    text = (
        HEAD.replace("steps: 20", "steps: 0")
        + "  optimizer.lr: fast\nsweep: {grid: {recipe: [bf16, lptt], seed: [1]}}\n"
    )
    message = error(tmp_path, text)
    assert message.count("  | ") == 6
    assert message.endswith("/s.yaml: 3 problems; nothing was started")


def test_allow_unpaired_keeps_the_reason(tmp_path: Path) -> None:
    text = "allow_unpaired: true\n" + BAD["unpaired"][0]
    expansion = expand(tmp_path, text)
    assert len(expansion.runs) == 2
    assert "shares no seed" in expansion.unpaired[0]


def test_exclude_that_matches_nothing_warns_with_its_line(tmp_path: Path) -> None:
    text = HEAD + "sweep:\n  grid: {recipe: [bf16], seed: [1]}\n  exclude:\n    - {recipe: uos}\n"
    (warning,) = expand(tmp_path, text).warnings
    assert "s.yaml:9" in warning
    assert "matches no point" in warning


@pytest.mark.parametrize(
    ("text", "expected"),
    [("optimizer.lr", "expected KEY=VALUE"), ("optimzer.lr=1", 'did you mean "optimizer"'), ("training.steps=0", "must be at least 1")],
)  # fmt: skip
def test_bad_set_says_so(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error(tmp_path, HEAD + SWEEP, (text,))
