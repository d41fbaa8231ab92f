"""What is on the figure, found by element id, and that no text lies on another or leaves the page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import rc_context
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from engine.recipes.table import RECIPES
from lptctl.commands.plot import recipe_infos
from plotting.api import Report, _figure_text, analyse
from plotting.figure import draw
from plotting.labels import Ruler, drawable, spread
from plotting.panels import PIXELS_PER_INCH
from plotting.theme import BLACK, DASHES, PALETTE, PRESETS, Preset, Style, rc_params, styles
from plotting.transform import ema
from tests.helpers.run_logs import add_event, add_steps, bare_run
from tests.helpers.synthetic_runs import ADVENTURES, Life, config, losses, write_sweep

INFOS = recipe_infos()
SIX = ("bf16", "baseline", "lpt", "midmax", "uos", "forward_only")


def figure_of(report: Report, preset: str = "page") -> Figure:
    text = _figure_text(report, "lptctl plot runs/synthetic")
    return draw(report.curves, baseline=report.options.baseline, preset=PRESETS[preset], text=text)


def sweep_report(folder: Path, **options: Any) -> Report:
    return analyse([write_sweep(folder, **options)], recipes=INFOS)


def artists(figure: Figure) -> dict[str, Any]:
    return {a.get_gid(): a for a in figure.findobj() if a.get_gid() is not None}


def words(figure: Figure) -> str:
    return "\n".join(t.get_text() for t in figure.findobj(Text) if t.get_text())


def write_curves(folder: Path, curves: dict[str, Sequence[Sequence[float]]]) -> Path:
    """Write finished runs: recipe -> one list of losses a seed."""
    for recipe, seeds in curves.items():
        for seed, values in enumerate(seeds, start=1):
            run = bare_run(folder / f"{recipe}{seed}", config(recipe, seed, steps=len(values)))
            add_steps(run, [(s, 1, v) for s, v in enumerate(values, start=1)])
            add_event(run, "exit", 1, code=0, cause="finished", step=len(values), message="")
    return folder


@pytest.fixture(scope="module")
def adventures(tmp_path_factory: pytest.TempPathFactory) -> Figure:
    return figure_of(sweep_report(tmp_path_factory.mktemp("a"), lives=ADVENTURES))


def test_lines_are_the_mean_of_the_smoothed_seeds(adventures: Figure) -> None:
    line = artists(adventures)["loss-midmax"]
    expected = np.mean([ema(losses("midmax", seed, 120), 0.9) for seed in (1, 2, 3)], axis=0)
    assert line.get_xdata().tolist() == list(range(1, 121))
    assert line.get_ydata() == pytest.approx(expected, rel=1e-12)
    gap = artists(adventures)["gap-midmax"]
    differences = [ema(losses("midmax", s, 120) - losses("bf16", s, 120), 0.9) for s in (1, 2, 3)]
    assert gap.get_ydata() == pytest.approx(np.mean(differences, axis=0), abs=1e-12)


def test_bands_reach_one_standard_deviation(adventures: Figure) -> None:
    band = artists(adventures)["gap-midmax-band"].get_paths()[0].vertices
    differences = [ema(losses("midmax", s, 120) - losses("bf16", s, 120), 0.9) for s in (1, 2, 3)]
    mean, sd = np.mean(differences, axis=0), np.std(differences, axis=0, ddof=1)
    at_100 = band[band[:, 0] == 100][:, 1]
    assert (at_100.min(), at_100.max()) == (pytest.approx(mean[99] - sd[99]), pytest.approx(mean[99] + sd[99]))


def test_logged_values_lie_faint_behind(adventures: Figure) -> None:
    found = artists(adventures)
    raw = [a for name, a in found.items() if name.startswith("raw-loss-uos-s1")]
    assert [a.get_ydata().tolist() for a in raw] == [losses("uos", 1, 120).tolist()]
    assert raw[0].get_alpha() < 0.3
    assert raw[0].get_zorder() < found["loss-uos"].get_zorder()


def test_a_nan_run_is_crossed_where_it_died_in_both_loss_panels_and_named(adventures: Figure) -> None:
    crosses = [a for name, a in artists(adventures).items() if name.startswith("nonfinite-")]
    assert [(a.get_marker(), a.get_xdata()[0], a.get_ydata()[0]) for a in crosses] == [("X", 88, 1.0)] * 2
    assert "baseline  [seed 2 nonfinite@88]" in words(adventures)
    assert "non-finite (NaN or Inf)" in words(adventures)
    # The line goes on with the seeds that are left, thin, and its label counts them.
    assert artists(adventures)["loss-baseline"].get_xdata()[-1] == 87
    assert artists(adventures)["loss-baseline-seed1"].get_xdata()[-1] == 120
    assert "baseline (2/3)" in words(adventures)
    assert "Thin: the seeds that go on" in words(adventures)


def test_an_infinite_gradient_norm_is_crossed_in_its_panel(tmp_path: Path) -> None:
    life = {("lpt", 1): Life(nonfinite_at=30, nonfinite_what="grad_norm")}
    figure = figure_of(sweep_report(tmp_path, recipes=("bf16", "lpt"), seeds=(1,), steps=40, lives=life))
    panels = sorted(name.split("-")[1] for name in artists(figure) if name.startswith("nonfinite-"))
    assert panels == ["gap", "grad_norm", "loss"]
    assert "lpt  [nonfinite@30]" in words(figure)


def test_resumes_are_hairlines_and_what_they_replaced_is_dotted(tmp_path: Path) -> None:
    life = {("lpt", 1): Life(stop_at=30, resume_from=20, resume_error=0.5)}
    figure = figure_of(sweep_report(tmp_path, recipes=("bf16", "lpt"), seeds=(1,), steps=40, lives=life))
    found = artists(figure)
    (hairline,) = [a for name, a in found.items() if name.startswith("resumed-lpt")]
    assert hairline.get_xdata()[0] == 21
    (dotted,) = [a for name, a in found.items() if name.startswith("superseded-lpt")]
    assert dotted.get_linestyle() == ":"
    assert dotted.get_xdata().tolist() == list(range(21, 31))
    assert "Warning: lpt seed 1: resume differs by 0.5" in words(figure)
    assert "Vertical hairlines: a run resumed. Dotted: superseded by a later attempt." in words(figure).replace(
        "\n", " "
    )


def test_one_seed_has_no_band_at_all(tmp_path: Path) -> None:
    figure = figure_of(sweep_report(tmp_path, recipes=("bf16", "lpt"), seeds=(1,), steps=40))
    assert not figure.findobj(PolyCollection)
    assert "one seed a recipe: no spread, no interval" in words(figure)
    assert "Bands" not in words(figure)


def test_many_groups_have_no_bands_and_the_caption_says_so(tmp_path: Path) -> None:
    figure = figure_of(sweep_report(tmp_path, recipes=list(RECIPES)[:9], seeds=(1, 2), steps=20))
    assert not [n for n in artists(figure) if n.endswith("-band")]
    assert "No bands for more than 8 lines: the table has the spread." in words(figure)


def test_the_grey_band_is_the_pooled_spread_of_the_baseline(tmp_path: Path) -> None:
    curves = {"bf16": [[3.0] * 40, [3.2] * 40], "lpt": [[3.5] * 40, [3.7] * 40]}
    figure = figure_of(analyse([write_curves(tmp_path / "s", curves)], recipes=INFOS))
    heights = artists(figure)["gap-noise"].get_paths()[0].vertices[:, 1]
    assert {round(abs(h), 12) for h in heights} == {round(0.1 * math.sqrt(2), 12)}


def test_a_grey_band_wider_than_the_view_is_said_in_words(tmp_path: Path) -> None:
    curves = {"bf16": [[3.0] * 40, [5.0] * 40], "lpt": [[3.01] * 40, [5.01] * 40]}
    found = artists(figure_of(analyse([write_curves(tmp_path / "s", curves)], recipes=INFOS)))
    assert "gap-noise" not in found
    assert found["gap-noise-note"].get_text() == "bf16 seed-to-seed sd ≈ 1.4, wider than this view"


def test_a_diverging_recipe_does_not_flatten_the_others(tmp_path: Path) -> None:
    steps = np.arange(1, 61)
    base = 5.0 - 2.0 * steps / 60
    curves = {
        "bf16": [base.tolist()], "lpt": [(base + 0.02).tolist()], "uos": [(base + 0.01).tolist()],
        "floor": [(base + np.where(steps > 30, 0.2 * (steps - 30), 0.0)).tolist()],
    }  # fmt: skip
    figure = figure_of(analyse([write_curves(tmp_path / "s", curves)], recipes=INFOS))
    loss, gap = figure.axes[:2]
    assert loss.get_ylim()[1] < 6.5
    assert gap.get_ylim()[1] < 0.05
    outside = [a for name, a in artists(figure).items() if name.startswith("outside-floor")]
    assert len(outside) >= 2
    assert {a.get_marker() for a in outside} == {"^"}


def test_missing_comparisons_are_said_in_the_panel(tmp_path: Path) -> None:
    alone = figure_of(sweep_report(tmp_path / "a", recipes=("lpt",), seeds=(1,), steps=5))
    assert "no bf16 run: nothing to compare" in words(alone)
    folder = write_curves(tmp_path / "b", {"bf16": [[3.0, 2.0]]})
    assert "no recipe shares a seed and settings with bf16" in words(figure_of(analyse([folder], recipes=INFOS)))
    assert "no validation yet" in words(figure_of(analyse([folder], recipes=INFOS)))


def test_a_sweep_that_has_not_begun_can_be_drawn(tmp_path: Path) -> None:
    bare_run(tmp_path / "s" / "a", config("bf16", 1))
    figure = figure_of(analyse([tmp_path / "s"], recipes=INFOS))
    for text in ("no training step logged yet", "no gradient norm logged yet", "no validation yet"):
        assert text in words(figure)


def test_a_run_of_one_step_can_be_drawn(tmp_path: Path) -> None:
    folder = write_curves(tmp_path / "s", {"bf16": [[3.0]], "lpt": [[3.0]]})
    assert artists(figure_of(analyse([folder], recipes=INFOS)))["gap-lpt"].get_ydata().tolist() == [0.0]


def test_the_end_is_enlarged_where_there_is_room_for_it(adventures: Figure, tmp_path: Path) -> None:
    assert artists(adventures)["loss-zoom"].get_xlim() == (96, 120)
    rising = write_curves(tmp_path / "s", {"bf16": [(3 + np.arange(60) / 10).tolist()]})
    assert "loss-zoom" not in artists(figure_of(analyse([rising], recipes=INFOS)))


def test_validation_shows_the_unigram_entropy_and_is_not_flattened_by_the_start(adventures: Figure) -> None:
    found = artists(adventures)
    assert found["unigram_entropy-3.3125"].get_ydata()[0] == 3.3125
    assert "unigram entropy 3.31" in words(adventures)
    assert adventures.axes[3].get_ylim()[1] < 3.5
    assert found["outside-bf16-0"].get_xdata() == [0]


def text_boxes(figure: Figure, preset: Preset) -> dict[str, tuple[float, float, float, float]]:
    figure.dpi = PIXELS_PER_INCH
    with rc_context(rc_params(preset)):
        figure.draw_without_rendering()
    axes = [*figure.axes, *(child for ax in figure.axes for child in ax.child_axes)]
    ticks = {
        t for ax in axes for axis in (ax.xaxis, ax.yaxis) for t in (*axis.get_major_ticks(), *axis.get_minor_ticks())
    }
    hidden = {id(text) for tick in ticks for text in (tick.label1, tick.label2)}
    for ax in axes:
        for axis, (low, high) in ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim()))):
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high:
                    hidden.discard(id(tick.label1))
    boxes = {}
    for index, text in enumerate(t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()):
        if id(text) not in hidden:
            box = text.get_window_extent()
            boxes[f"{index}: {text.get_text()}"] = (box.x0, box.y0, box.x1, box.y1)
    return boxes


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("which", ["adventures", "twenty"])
def test_no_text_lies_on_another_or_leaves_the_page(tmp_path: Path, preset: str, which: str) -> None:
    many = which == "twenty"
    folder = write_sweep(
        tmp_path, recipes=list(RECIPES) if many else SIX, seeds=(1,) if many else (1, 2, 3), steps=120,
        lives={} if many else ADVENTURES, log_every=10,
    )  # fmt: skip
    figure = figure_of(analyse([folder], recipes=INFOS), preset)
    boxes = text_boxes(figure, PRESETS[preset])
    width, height = figure.get_figwidth() * figure.dpi, figure.get_figheight() * figure.dpi
    tolerance = 0.012 * figure.dpi  # of an inch: the box of a line includes its descenders
    for name, (x0, y0, x1, y1) in boxes.items():
        assert x0 >= -tolerance, name
        assert y0 >= -tolerance, name
        assert x1 <= width + tolerance, name
        assert y1 <= height + tolerance, name
    for (a, p), (b, q) in itertools.combinations(boxes.items(), 2):
        overlap = min(min(p[2], q[2]) - max(p[0], q[0]), min(p[3], q[3]) - max(p[1], q[1]))
        assert overlap <= 2 * tolerance, f"{a} | {b}"


def test_slides_are_16_by_9_whatever_is_on_them(tmp_path: Path) -> None:
    for recipes in (SIX[:2], list(RECIPES)[:12]):
        folder = write_sweep(tmp_path / str(len(recipes)), recipes=recipes, seeds=(1,), steps=5)
        figure = figure_of(analyse([folder], recipes=INFOS), "slides")
        assert figure.get_figwidth() / figure.get_figheight() == pytest.approx(16 / 9)


@given(st.lists(st.floats(-2, 12), max_size=9))
def test_labels_are_spread_without_overlap_in_order_and_in_place(wanted: list[float]) -> None:
    placed = spread(wanted, 1.0, 0.0, 10.0)
    assert placed is not None
    order = np.argsort(np.asarray(wanted), kind="stable")
    in_order = [placed[i] for i in order]
    assert all(b - a >= 1.0 - 1e-9 for a, b in itertools.pairwise(in_order))
    assert all(0.5 - 1e-9 <= y <= 9.5 + 1e-9 for y in placed)


def test_labels_that_have_room_stay_where_they_are_and_too_many_do_not_fit() -> None:
    assert spread([1.0, 5.0, 3.0], 1.0, 0.0, 10.0) == pytest.approx([1.0, 5.0, 3.0])
    assert spread([5.0, 5.0], 1.0, 0.0, 10.0) == pytest.approx([4.5, 5.5])
    assert spread([1.0] * 11, 1.0, 0.0, 10.0) is None
    assert spread([], 1.0, 0.0, 10.0) == []


def test_text_is_wrapped_and_shortened_to_its_measured_width() -> None:
    ruler = Ruler()
    text = "one two three four five six seven eight nine ten"
    lines = ruler.wrap(text, 8, 1.0)
    assert " ".join(lines) == text
    assert len(lines) > 1
    assert all(ruler.width(line, 8) <= 1.0 for line in lines)
    short = ruler.shorten(text, 8, 1.0)
    assert ruler.width(short, 8) <= 1.0
    assert short.startswith("one")
    assert short.endswith("ten")
    assert "…" in short
    assert ruler.shorten("one", 8, 1.0) == "one"


def test_text_without_a_glyph_becomes_a_question_mark() -> None:
    assert drawable("Größe ±1 σ $x$") == "Größe ±1 σ $x$"
    assert drawable("a\n漢\udc80\x01b") == "a????b"


def linear(color: str) -> np.ndarray:
    c = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
# Machado, Oliveira and Fernandes (2009), severity 1.0, linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(rgb: np.ndarray) -> np.ndarray:
    t = TO_XYZ @ np.clip(rgb, 0, 1) / (TO_XYZ @ np.ones(3))
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", list(VISION))
def test_lines_of_one_dash_differ_for_every_colour_vision(vision: str) -> None:
    seen = {c: lab(np.asarray(VISION[vision]) @ linear(c)) for c in (BLACK, *PALETTE)}
    for a, b in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[a] - seen[b]) >= 15, (a, b)  # CIE 1976 difference


def test_every_group_has_a_look_of_its_own(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, recipes=list(RECIPES), seeds=(1,), steps=2)
    groups = [row.group for row in analyse([folder], recipes=INFOS).rows]
    found = styles(groups, "bf16", PRESETS["page"])
    assert len({(s.color, s.dash) for s in found.values()}) == len(groups) == len(RECIPES)
    assert (found["bf16"].color, found["bf16"].dash) == (BLACK, DASHES[0])
    assert found["bf16"].width_pt > found["lpt"].width_pt


def test_labels_have_a_contrast_of_3_on_white() -> None:
    for color in (BLACK, *PALETTE):
        ink = Style(color=color, dash=DASHES[0], width_pt=1.0).ink
        assert 1.05 / (0.05 + float(TO_XYZ[1] @ linear(ink))) >= 2.99
    assert Style(color=PALETTE[0], dash=DASHES[0], width_pt=1.0).ink == PALETTE[0]


def test_drawing_leaves_no_global_state(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figure_of(sweep_report(tmp_path, recipes=("bf16",), seeds=(1,), steps=3))
    assert dict(mpl.rcParams) == before
