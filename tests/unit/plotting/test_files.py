"""What is written: figures with provenance and stable bytes, tables and curves in full."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from lptctl.commands.plot import recipe_infos
from plotting import export
from plotting.api import Options, Report, make_report
from plotting.export import FORMATS
from plotting.schema import PlotError
from tests.helpers.run_logs import add_event, add_steps, bare_run
from tests.helpers.synthetic_runs import Life, config, losses, write_sweep

INFOS = recipe_infos()
LIVES = {
    ("lpt", 1): Life(stop_at=33, resume_from=20),
    ("baseline", 2): Life(nonfinite_at=28),
    ("uos", 3): Life(stop_at=25, torn=True),
}
COMMAND = "lptctl plot 'ä #% $x$ <&>'"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five recipes, three seeds: one resumed, one NaN, one running; below an awkward path."""
    return write_sweep(tmp_path_factory.mktemp("x") / "ä ß #1 100% 'q' [x]", lives=LIVES, steps=40)


def draw(sweep: Path, out: Path, **options: str) -> Report:
    return make_report([sweep], options=Options.parse(**options), recipes=INFOS, out=out, command=COMMAND)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return draw(sweep, tmp_path_factory.mktemp("out") / "ü & <b>", formats=",".join(FORMATS))


def folder(report: Report) -> Path:
    return report.files[0].parent


def test_every_file_is_written_and_named(report: Report) -> None:
    names = ["comparison.png", "comparison.svg", "comparison.pdf", "table.md", "table.csv", "curves.csv"]
    assert [path.name for path in report.files] == names
    assert sorted(p.name for p in folder(report).iterdir()) == sorted(names)
    assert all(path.stat().st_size > 1000 for path in report.files)


def test_png_has_the_preset_width_at_200_dpi(report: Report) -> None:
    data = report.files[0].read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", data[16:20])[0] == 1380  # 6.9 in
    from PIL import Image

    with Image.open(report.files[0]) as image:
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50  # not an empty page
        assert image.info["Title"] == "lptctl: synthetic"
        assert COMMAND in image.info["Description"]


def test_svg_is_well_formed_with_text_as_text_and_its_provenance(report: Report) -> None:
    text = report.files[1].read_text()
    root = ElementTree.fromstring(text)
    words = {"".join(e.itertext()) for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"training loss (nats/token)", "gap to bf16 (nats/token)", "grad norm (before clipping)"} <= words
    assert "Warning: 1 of 15 runs unfinished" in words
    assert any(COMMAND in w for w in words)
    description = "".join(root.itertext())
    for part in ("command: lptctl plot", "smoothing: debiased EMA 0.9", "seeds: 1, 2, 3", "revisions: 0123456789ab"):
        assert part in description
    assert not re.search(r"\b20\d\d-\d\d-\d\d", text)


def test_pdf_embeds_fonts_as_text_without_a_date(report: Report) -> None:
    data = report.files[2].read_bytes()
    assert data.startswith(b"%PDF-")
    assert data.rstrip().endswith(b"%%EOF")
    assert b"/FontType 42" in data or b"/Type /Font" in data
    assert b"CreationDate" not in data


def test_same_input_gives_same_bytes(report: Report, sweep: Path, tmp_path: Path) -> None:
    again = draw(sweep, tmp_path, formats=",".join(FORMATS))
    for old, new in zip(report.files, again.files, strict=True):
        assert old.read_bytes() == new.read_bytes(), new.name


def test_svg_ids_are_unique_and_name_what_they_draw(report: Report) -> None:
    found = re.findall(r'id="([^"]+)"', report.files[1].read_text())
    assert len(found) == len(set(found))
    assert {"loss-bf16", "gap-lpt", "gap-lpt-band", "gap-zero", "grad_norm-uos", "val_loss-baseline"} <= set(found)


def test_only_what_is_asked_for_is_written_and_the_table_always(sweep: Path, tmp_path: Path) -> None:
    assert [p.name for p in draw(sweep, tmp_path / "a", formats="csv").files] == ["table.md", "table.csv", "curves.csv"]
    assert [p.name for p in draw(sweep, tmp_path / "b", formats="svg").files] == ["comparison.svg", "table.md"]


def test_default_folder_is_the_sweeps_or_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_sweep(tmp_path, recipes=("bf16",), seeds=(1,), steps=5, sweep="one")
    two = write_sweep(tmp_path, recipes=("lpt",), seeds=(1,), steps=5, sweep="two")
    options = Options.parse(formats="csv")
    assert make_report([one], options=options).files[0] == one / "plots" / "table.md"
    monkeypatch.chdir(tmp_path)
    assert make_report([one, two], options=options).files[0] == Path("plots/table.md")


def test_a_folder_that_cannot_be_written_is_named(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlotError, match=r"cannot be written: .*; choose another folder with --out DIR"):
        draw(sweep, tmp_path / "file" / "plots", formats="csv")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export.write(tmp_path / "table.md", [b"old"])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.os, "replace", full)
    with pytest.raises(PlotError, match=r"table\.md: cannot be written: No space left on device"):
        export.write(tmp_path / "table.md", [b"new"])
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]


def test_curves_hold_every_number_in_full(report: Report, sweep: Path) -> None:
    frame = pd.read_csv(folder(report) / "curves.csv", keep_default_na=False, dtype=str)
    assert list(frame.columns) == [
        "sweep", "run_id", "group", "recipe", "seed", "attempt", "step", "tokens", "time", "metric", "value", "status",
    ]  # fmt: skip
    mine = frame[(frame.recipe == "lpt") & (frame.seed == "1") & (frame.metric == "loss")]
    assert len(mine) == 33 + 20
    assert mine.status.value_counts().to_dict() == {"ok": 40, "superseded": 13}
    kept = mine[mine.status == "ok"].sort_values("step", key=lambda s: s.astype(int))
    assert [float(v) for v in kept.value] == losses("lpt", 1, 40).tolist()
    (run,) = sweep.glob("lpt-s1*")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(frame[(frame.run_id == run.name) & (frame.metric == "lr")]) == len(lines) - 1  # step 0 has none


def test_curves_keep_non_finite_numbers_by_name(report: Report) -> None:
    frame = pd.read_csv(folder(report) / "curves.csv", keep_default_na=False, dtype=str)
    bad = frame[frame.status == "nonfinite"]
    assert set(zip(bad.metric, bad.value, bad.step, strict=True)) >= {("loss", "nan", "28"), ("gap", "nan", "28")}
    assert set(bad.recipe) == {"baseline"}


def test_curves_hold_the_gap_that_is_drawn(report: Report) -> None:
    frame = pd.read_csv(folder(report) / "curves.csv", keep_default_na=False, dtype=str)
    gap = frame[(frame.metric == "gap") & (frame.recipe == "midmax") & (frame.seed == "2")]
    expected = losses("midmax", 2, 40) - losses("bf16", 2, 40)
    assert [float(v) for v in gap.value] == pytest.approx(expected.tolist(), abs=1e-15)
    assert {"loss_smoothed", "gap_smoothed"} <= set(frame.metric)
    assert (frame[frame.metric == "gap"].tokens == "").all()


def test_table_csv_has_one_row_a_group_with_plain_numbers(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO((folder(report) / "table.csv").read_text())))
    assert [r["group"] for r in rows] == ["bf16", "baseline", "lpt", "midmax", "uos"]
    lpt = rows[2]
    assert (lpt["baseline"], lpt["reference"], lpt["baseline_pairs"]) == ("bf16", "baseline", "3")
    assert json.loads(lpt["seeds"]) == [1, 2, 3]
    assert json.loads(rows[1]["nonfinite"]) == {"2": 28}
    assert float(lpt["baseline_delta_low"]) < float(lpt["baseline_delta"]) < float(lpt["baseline_delta_high"])
    assert rows[0]["baseline_delta"] == ""


def test_table_markdown_is_a_table_and_the_sentences(report: Report) -> None:
    lines = (folder(report) / "table.md").read_text().splitlines()
    assert lines[0].startswith("| recipe | seeds | train loss | val loss | Δ to bf16 [95 %] |")
    assert set(lines[1]) <= set("|-: ")
    assert len({line.count("|") for line in lines[:7]}) == 1
    assert lines[3].startswith("| baseline | 2 of 3 | ")
    assert "2 finished; seed 2: nonfinite@28" in lines[3]
    assert lines[7] == ""
    assert [line.removeprefix("- ") for line in lines[8:]] == [n.text for n in report.notes]


def test_markdown_cells_cannot_break_the_table() -> None:
    text = export.table_markdown(["a|b"], [["c|d"]], []).decode()
    assert text.splitlines()[2] == r"| c\|d |"


def test_json_report_is_strict_json_with_everything(report: Report) -> None:
    tree = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert tree["version"] == 1
    assert (tree["baseline"], tree["pairing"]["verdict"], tree["sweeps"]) == ("bf16", "paired", ["synthetic"])
    assert [row["group"] for row in tree["rows"]] == ["bf16", "baseline", "lpt", "midmax", "uos"]
    assert tree["rows"][2]["overlap_max_abs_dloss"] == {"1": 0.0}
    assert tree["rows"][3]["reference_delta_is_resolved"] in (True, False)
    assert {note["level"] for note in tree["notes"]} == {"warning", "info"}
    assert tree["files"] == [str(p) for p in report.files]


def test_json_writes_infinite_numbers_as_text(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "s" / "r", config("bf16", 1, steps=3))
    add_steps(run, [(1, 1, 5.0), (2, 1, math.inf), (2, 2, 4.0), (3, 2, 4.0)])
    add_event(run, "exit", 2, code=0, cause="finished", step=3, message="")
    report = make_report([run], options=Options.parse(formats="csv"), out=tmp_path)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["rows"][0]["overlap_max_abs_dloss"] == {"1": "inf"}
