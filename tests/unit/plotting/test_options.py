"""Options as texts, and what importing the package loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lptctl.cli import app
from plotting import export
from plotting.api import Options
from plotting.panels import MOST_BANDS
from plotting.schema import PlotError
from plotting.theme import PRESETS
from tests.helpers.runs import ROOT


def test_options_are_read_from_texts() -> None:
    options = Options.parse(smooth="none", baseline="lpt", last="50", preset="slides", formats="pdf, csv,pdf")
    assert options.smoothing.weight is None
    assert (options.baseline, options.last, options.preset) == ("lpt", 50, "slides")
    assert options.formats == ("pdf", "csv")
    assert Options.parse() == Options()


def test_every_bad_option_is_named_at_once() -> None:
    with pytest.raises(PlotError) as caught:
        Options.parse(smooth="ema:1", last="0", preset="poster", formats="png,gif,jpeg")
    assert caught.value.problems == [
        '--smooth "ema:1": expected none, or ema:S with 0 <= S < 1, e.g. ema:0.9',
        '--last "0": expected auto, or a number of logged points of at least 1',
        '--preset "poster": expected one of page, column, slides',
        '--format "gif", "jpeg": expected a comma list of png, svg, pdf, csv',
    ]


@pytest.mark.parametrize("last", ["", "-1", "1.5", "ten", "²"])
def test_last_must_be_a_whole_number(last: str) -> None:
    with pytest.raises(PlotError, match="expected auto, or a number of logged points"):
        Options.parse(last=last)


def test_an_empty_list_of_formats_is_refused() -> None:
    with pytest.raises(PlotError, match='--format "": expected a comma list'):
        Options.parse(formats="")


def test_plotting_imports_neither_torch_nor_the_rest_of_the_project(tmp_path: Path) -> None:
    for name in ("torch", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('must not be imported')\n")
    code = (
        "import sys, plotting.api; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'engine', 'lptctl', 'rdma_tests'}), "
        "'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout == "[] False\n", done.stderr


def test_the_documentation_names_every_option_column_and_status() -> None:
    text = (ROOT / "docs" / "plot.md").read_text()
    options = {o for p in typer.main.get_command(app).commands["plot"].params for o in p.opts if o.startswith("--")}  # type: ignore[attr-defined]
    assert len(options) >= 8
    for word in (
        *options,
        ", ".join(export.CURVE_COLUMNS),
        *PRESETS,
        *export.FORMATS,
        f"more than {MOST_BANDS} groups",
    ):
        assert word in text, word
