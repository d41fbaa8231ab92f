"""The one call: run directories in; a figure, tables and sentences out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plotting import export
from plotting.clean import Run, clean
from plotting.curves import GroupCurves, build_curves
from plotting.figure import FigureText, draw
from plotting.group import Pairing, group_runs
from plotting.panels import MOST_BANDS, has_bands
from plotting.schema import PlotError, RecipeInfo
from plotting.sources.rundir import discover, read_runs
from plotting.table import Row, build_rows
from plotting.theme import PRESETS
from plotting.transform import Smoothing
from plotting.verdict import Note, notes

__all__ = ["Options", "PlotError", "RecipeInfo", "Report", "analyse", "make_report"]

JSON_VERSION = 1
"""Version of the JSON report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to compare and what to write."""

    smoothing: Smoothing = field(default_factory=lambda: Smoothing(weight=0.9))
    """For curves; tables never smooth."""
    baseline: str = "bf16"
    """Recipe that gaps are measured from."""
    last: int | None = None
    """Logged points that the final training loss averages; None for :func:`plotting.transform.default_window`."""
    preset: str = "page"
    """Name in :data:`plotting.theme.PRESETS`."""
    formats: tuple[str, ...] = ("png", "svg", "csv")
    """Of :data:`plotting.export.FORMATS`; csv stands for curves.csv and table.csv. table.md is always written."""

    @classmethod
    def parse(
        cls, *, smooth: str = "ema:0.9", baseline: str = "bf16", last: str = "auto", preset: str = "page",
        formats: str = "png,svg,csv",
    ) -> Options:  # fmt: skip
        """Read the command line's texts.

        Raises:
            PlotError: with every option that is wrong.
        """
        problems: list[str] = []
        smoothing, window = Smoothing(weight=None), None
        try:
            smoothing = Smoothing.parse(smooth)
        except PlotError as error:
            problems += error.problems
        if last != "auto":
            if last.isdecimal() and int(last) >= 1:
                window = int(last)
            else:
                problems.append(f'--last "{last}": expected auto, or a number of logged points of at least 1')
        if preset not in PRESETS:
            problems.append(f'--preset "{preset}": expected one of {", ".join(PRESETS)}')
        wanted = tuple(dict.fromkeys(f.strip() for f in formats.split(",")))
        unknown = [f for f in wanted if f not in export.FORMATS]
        if unknown:
            listed = ", ".join(f'"{f}"' for f in unknown)
            problems.append(f"--format {listed}: expected a comma list of {', '.join(export.FORMATS)}")
        if problems:
            raise PlotError(problems)
        return cls(smoothing=smoothing, baseline=baseline, last=window, preset=preset, formats=wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A comparison: its table, its curves and what can be said of it."""

    rows: tuple[Row, ...]
    """One row a group."""
    curves: tuple[GroupCurves, ...]
    """One a group, in the order of ``rows``."""
    pairing: Pairing
    """Whether equal seeds are pairs."""
    notes: tuple[Note, ...]
    """Sentences, warnings first."""
    options: Options
    """As given."""
    sweeps: tuple[str, ...]
    """Names of the sweeps."""
    revisions: tuple[str, ...]
    """Git revisions of the launches."""
    files: tuple[Path, ...] = ()
    """What was written."""

    @property
    def is_flawed(self) -> bool:
        """True if any note is a warning, e.g. of a non-finite, unfinished or unpaired run (``--strict`` asks)."""
        return any(note.level == "warning" for note in self.notes)

    @property
    def num_runs(self) -> int:
        """Runs compared."""
        return sum(len(row.group.runs) for row in self.rows)

    def table(self, *, is_full: bool = False) -> tuple[list[str], list[list[str]]]:
        """Return header and cells as text; unless ``is_full`` without columns that are the same in every row."""
        return export.header_and_cells(self.rows, baseline=self.options.baseline, is_full=is_full)

    def to_json(self) -> dict[str, Any]:
        """Return everything but the curves as JSON values; non-finite numbers are "nan", "inf" or "-inf"."""
        value: dict[str, Any] = {
            "version": JSON_VERSION,
            "sweeps": list(self.sweeps),
            "revisions": list(self.revisions),
            "baseline": self.options.baseline,
            "smoothing": str(self.options.smoothing),
            "pairing": {"verdict": self.pairing.verdict, "problems": list(self.pairing.problems)},
            "rows": [export.row_record(row) for row in self.rows],
            "notes": [{"level": note.level, "text": note.text} for note in self.notes],
            "files": [str(path) for path in self.files],
        }
        out: dict[str, Any] = export.jsonable(value)
        return out


def analyse(
    paths: Sequence[str | Path], *, options: Options | None = None, recipes: Mapping[str, RecipeInfo] | None = None
) -> Report:
    """Read and compare runs; write nothing. ``recipes`` gives references, presets and the order of the table.

    Raises:
        PlotError: with every problem: no run found, unreadable files, a window longer than the runs.
    """
    options = options or Options()
    recipes = recipes or {}
    return _compare(discover(paths), options, recipes)


def make_report(
    paths: Sequence[str | Path],
    *,
    options: Options | None = None,
    recipes: Mapping[str, RecipeInfo] | None = None,
    out: Path | None = None,
    command: str = "plotting.api.make_report",
) -> Report:
    """Compare runs and write comparison.{png,svg,pdf}, curves.csv, table.csv and table.md.

    ``out`` defaults to ``plots`` in the sweep's folder if all runs are of one sweep, else to ``plots`` in the current
    one. ``command`` goes into the figures' metadata.

    Raises:
        PlotError: as :func:`analyse`, and for files that cannot be written.
    """
    options = options or Options()
    runs = discover(paths)
    report = _compare(runs, options, recipes or {})
    parents = {run.resolve().parent for run in runs}
    folder = out or ((runs[0].parent if len(parents) == 1 else Path()) / "plots")
    files = []
    figure_formats = [f for f in export.FIGURE_FORMATS if f in options.formats]
    if figure_formats:
        preset = PRESETS[options.preset]
        text = _figure_text(report, command)
        figure = draw(report.curves, baseline=options.baseline, preset=preset, text=text)
        description = _description(report, command)
        for kind in figure_formats:
            path = folder / f"comparison.{kind}"
            title = f"lptctl: {', '.join(report.sweeps)}"
            export.save_figure(figure, path, preset=preset, title=title, description=description)
            files.append(path)
    header, cells = report.table(is_full=True)
    pieces: dict[str, Iterable[bytes]] = {
        "table.md": [export.table_markdown(header, cells, [note.text for note in report.notes])]
    }
    if "csv" in options.formats:
        pieces["table.csv"] = [export.table_csv(report.rows)]
        pieces["curves.csv"] = export.curves_csv(report.curves)
    for name, data in pieces.items():
        export.write(folder / name, data)
        files.append(folder / name)
    return Report(
        rows=report.rows, curves=report.curves, pairing=report.pairing, notes=report.notes, options=options,
        sweeps=report.sweeps, revisions=report.revisions, files=tuple(files),
    )  # fmt: skip


def _compare(paths: Sequence[Path], options: Options, recipes: Mapping[str, RecipeInfo]) -> Report:
    runs = [clean(raw) for raw in read_runs(paths)]
    groups = group_runs(runs, recipes)
    rows = build_rows(groups, baseline=options.baseline, recipes=recipes, last=options.last)
    pairing, found = notes(groups, rows, baseline=options.baseline, recipes=recipes)
    return Report(
        rows=tuple(rows),
        curves=tuple(build_curves(groups, baseline=options.baseline, smoothing=options.smoothing)),
        pairing=pairing,
        notes=tuple(found),
        options=options,
        sweeps=tuple(dict.fromkeys(run.info.sweep for run in runs)),
        revisions=tuple(dict.fromkeys(run.info.revision for run in runs if run.info.revision is not None)),
    )


def _figure_text(report: Report, command: str) -> FigureText:
    runs = [run for row in report.rows for run in row.group.runs]
    most = max(len(row.group.runs) for row in report.rows)
    seeds = f"mean of {most} seeds" if most > 1 else "one seed a recipe: no spread, no interval"
    smoothing = report.options.smoothing
    parts = [
        f"Lines: {smoothing}, {seeds}." if smoothing.weight is not None else f"Lines: {seeds}.",
        "Faint: as logged." if smoothing.weight is not None or most > 1 else "",
        "Bands: ±1 sd over seeds (gap: over seed pairs)." if has_bands(report.curves) else "",
        f"No bands for more than {MOST_BANDS} lines: the table has the spread."
        if most > 1 and not has_bands(report.curves)
        else "",
    ]
    if any(len({_last_finite(run) for run in c.group.runs}) > 1 for c in report.curves):
        parts.append("Thin: the seeds that go on where others have stopped.")
    bases = [c for c in report.curves if c.is_baseline]
    if len(bases) == 1 and len(bases[0].group.runs) > 1 and any(c.gap is not None for c in report.curves):
        parts.append(f"Grey: pooled ±1 sd over {report.options.baseline}'s seeds.")
    if any(run.boundaries for run in runs):
        parts.append("Vertical hairlines: a run resumed.")
    if any(run.overlap is not None and run.overlap.max_abs_dloss > 0 for run in runs):
        parts.append("Dotted: superseded by a later attempt.")
    revision = ", ".join(r[:12] + ("+dirty" if r.endswith("+dirty") else "") for r in report.revisions[:2])
    count = f"{len(runs)} run{'s' * (len(runs) > 1)} of {', '.join(report.sweeps)}"
    provenance = " · ".join(p for p in (command, count, f"revision {revision}" if revision else "") if p)
    warnings = tuple(f"Warning: {note.short}" for note in report.notes if note.short)
    return FigureText(caption=" ".join(p for p in parts if p), provenance=provenance, warnings=warnings)


def _last_finite(run: Run) -> int:
    steps, values = run.series("loss")
    finite = steps[np.isfinite(values)]
    return int(finite[-1]) if len(finite) else 0


def _description(report: Report, command: str) -> str:
    runs = [run for row in report.rows for run in row.group.runs]
    windows = sorted({row.window for row in report.rows})
    lines = [
        f"command: {command}",
        f"sweeps: {', '.join(report.sweeps)}",
        f"runs: {', '.join(run.info.run_id for run in runs)}",
        f"seeds: {', '.join(str(s) for s in sorted({run.info.seed for run in runs}))}",
        f"smoothing: {report.options.smoothing}",
        f"final loss: mean of the last {' or '.join(map(str, windows))} logged steps",
        f"pairing: {report.pairing.verdict}",
        f"revisions: {', '.join(report.revisions) or 'none recorded'}",
    ]
    return "\n".join([*lines, *(f"warning: {n.text}" for n in report.notes if n.level == "warning")])
