"""Files: figures with their provenance inside, curves.csv in full, the table as CSV, Markdown and JSON.

Every file is written beside its place and renamed into it, so that a full disk leaves the old one whole.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from plotting.clean import Run
from plotting.curves import GroupCurves
from plotting.panels import PIXELS_PER_INCH
from plotting.schema import METRICS, FloatArray, IntArray, PlotError
from plotting.stats import Estimate, PairedDifference
from plotting.table import Comparison, Row
from plotting.theme import Preset, rc_params
from plotting.verdict import interval

FIGURE_FORMATS = ("png", "svg", "pdf")
FORMATS = (*FIGURE_FORMATS, "csv")


def save_figure(figure: Figure, path: Path, *, preset: Preset, title: str, description: str) -> None:
    """Write PNG (200 dpi), SVG or PDF by the suffix, without a date: the same input gives the same bytes.

    Raises:
        PlotError: if the file cannot be written.
    """
    kind = path.suffix[1:]
    description = "".join(c if c.isprintable() or c == "\n" else "?" for c in description)
    metadata: dict[str, Any] = {"Title": title, "Description": description}
    if kind == "svg":
        metadata |= {"Date": None, "Creator": "lptctl"}
    elif kind == "pdf":
        metadata = {"Title": title, "Subject": description, "Creator": "lptctl", "CreationDate": None}
    buffer = io.BytesIO()
    with matplotlib.rc_context(rc_params(preset)):
        figure.savefig(buffer, format=kind, dpi=PIXELS_PER_INCH, metadata=metadata)
    write(path, [buffer.getvalue()])


def write(path: Path, data: Iterable[bytes]) -> None:
    """Write a file, given in pieces, whole or not at all.

    Raises:
        PlotError: if the folder or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PlotError(
            [f"{path}: cannot be written: {error.strerror or error}; choose another folder with --out DIR"]
        ) from error


CURVE_COLUMNS = (
    "sweep", "run_id", "group", "recipe", "seed", "attempt", "step", "tokens", "time", "metric", "value", "status",
)  # fmt: skip


def curves_csv(curves: Sequence[GroupCurves]) -> Iterator[bytes]:
    """Yield every number as one long CSV table, superseded and non-finite ones included, a run and metric at a time.

    ``status`` is ok, superseded or nonfinite. Floats are in full repr, non-finite ones nan, inf and -inf. Derived
    metrics (loss_smoothed, gap, gap_smoothed) have no attempt, tokens or time.
    """
    yield (",".join(CURVE_COLUMNS) + "\n").encode()
    for c in curves:
        for part in _curve_parts(c):
            part["value"] = [repr(float(v)) for v in part["value"]]
            if "time" in part:
                part["time"] = [repr(float(t)) for t in part["time"]]
            frame = pd.DataFrame(part).reindex(columns=CURVE_COLUMNS)
            yield frame.to_csv(index=False, header=False, lineterminator="\n").encode()


def _curve_parts(c: GroupCurves) -> Iterator[dict[str, Any]]:
    for run in c.group.runs:
        records = run.records
        for metric in METRICS:
            keep = records.present[metric]
            values = records.values[metric][keep]
            yield {
                **_part(c, run, metric, records.step[keep], values),
                "attempt": records.attempt[keep],
                "tokens": records.tokens[keep],
                "time": records.time[keep],
                "status": np.where(run.superseded[keep], "superseded", _status(values)),
            }
    derived = [("loss_smoothed", c.loss, c.loss.smoothed)]
    if c.gap is not None:
        derived += [("gap", c.gap, c.gap.raw), ("gap_smoothed", c.gap, c.gap.smoothed)]
    for metric, curve, series in derived:
        for run, (steps, values) in zip(curve.runs, series, strict=True):
            yield _part(c, run, metric, steps, values)


def _part(c: GroupCurves, run: Run, metric: str, steps: IntArray, values: FloatArray) -> dict[str, Any]:
    return {
        "sweep": run.info.sweep,
        "run_id": run.info.run_id,
        "group": c.group.label,
        "recipe": c.group.recipe,
        "seed": run.info.seed,
        "step": steps,
        "metric": metric,
        "value": values,
        "status": _status(values),
    }


def _status(values: FloatArray) -> npt.NDArray[np.str_]:
    return np.where(np.isfinite(values), "ok", "nonfinite")


def row_record(row: Row) -> dict[str, Any]:
    """Return one row as flat plain values, for CSV and JSON; None where there is no number."""
    out: dict[str, Any] = {
        "group": row.group.label,
        "recipe": row.group.recipe,
        "overrides": {k: _plain(v) for k, v in row.group.overrides},
        "keys": {k: _plain(v) for k, v in row.group.keys},
        "seeds": [run.info.seed for run in row.group.runs],
        "n_seeds": len(row.group.runs),
        "seeds_used": list(row.seeds_used),
        "steps": row.steps,
        "status": row.status,
        "is_final": row.is_final,
        "at_step": row.at_step if row.seeds_used else None,
        "window": row.window,
        **_estimate("loss", row.loss),
        **_estimate("val_loss", row.val_loss),
        "val_step": row.val_step,
        **_comparison("baseline", row.against_baseline),
        **_comparison("reference", row.against_reference),
        "step_time_ratio": row.time_ratio,
        "attempts": row.attempts,
        "nonfinite_blocks": row.nonfinite_blocks,
        "nonfinite": {str(r.info.seed): r.status.step for r in row.group.runs if r.status.kind == "nonfinite"},
        "overlap_max_abs_dloss": {
            str(r.info.seed): r.overlap.max_abs_dloss for r in row.group.runs if r.overlap is not None
        },
    }
    return out


def table_csv(rows: Sequence[Row]) -> bytes:
    """Return the table as CSV, one row a group; lists and mappings as JSON."""
    records = [
        {k: json.dumps(v) if isinstance(v, (dict, list)) else v for k, v in jsonable(row_record(row)).items()}
        for row in rows
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def table_markdown(header: Sequence[str], cells: Sequence[Sequence[str]], notes: Sequence[str]) -> bytes:
    """Return the table and the sentences below it as Markdown."""

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(v.replace("|", "\\|") for v in values) + " |"

    rule = "|" + "|".join(" --- " if i == 0 else " ---: " for i in range(len(header))) + "|"
    body = [line(header), rule, *(line(c) for c in cells), "", *(f"- {note}" for note in notes)]
    return ("\n".join(body) + "\n").encode()


def header_and_cells(rows: Sequence[Row], *, baseline: str, is_full: bool) -> tuple[list[str], list[list[str]]]:
    """Return the table in words. Unless ``is_full``, columns that hold nothing of note are left out."""
    columns: list[tuple[str, list[str], bool]] = [
        ("recipe", [row.group.label for row in rows], True),
        ("seeds", [_seed_cell(row) for row in rows], True),
        ("train loss", [_estimate_cell(row.loss, row) for row in rows], True),
        ("val loss", [_estimate_cell(row.val_loss, row) for row in rows], True),
        (f"Δ to {baseline} [95 %]", [_difference_cell(row.against_baseline) for row in rows], True),
        ("Δ to its reference [95 %]", [_reference_cell(row, baseline, is_full) for row in rows], True),
        ("step time", ["–" if row.time_ratio is None else f"×{row.time_ratio:.2f}" for row in rows], True),
        ("steps", [f"{row.steps}" for row in rows], len({row.steps for row in rows}) > 1),
        ("attempts", [f"{row.attempts}" for row in rows], any(row.attempts > 1 for row in rows)),
        ("non-finite blocks", [f"{row.nonfinite_blocks}" for row in rows], any(row.nonfinite_blocks for row in rows)),
        ("status", [row.status for row in rows], any(row.status != "finished" for row in rows)),
    ]
    kept = [(name, cells) for name, cells, is_telling in columns if is_full or is_telling]
    return [name for name, _ in kept], [list(cells) for cells in zip(*(c for _, c in kept), strict=True)]


def jsonable(value: Any) -> Any:
    """Replace non-finite floats by their text form, as the run directory does."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    return value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _estimate(name: str, value: Estimate | None) -> dict[str, Any]:
    if value is None:
        return {name: None, f"{name}_sd": None}
    return {name: value.mean, f"{name}_sd": value.sd}


def _comparison(name: str, value: Comparison | None) -> dict[str, Any]:
    loss: PairedDifference | None = None if value is None else value.loss
    val: PairedDifference | None = None if value is None else value.val_loss
    out: dict[str, Any] = {
        f"{name}": None if value is None else value.reference,
        f"{name}_pairs": None if loss is None else loss.n,
        f"{name}_at_step": None if value is None else value.at_step,
    }
    for prefix, difference in ((f"{name}_delta", loss), (f"{name}_val_delta", val)):
        for field in ("mean", "sd", "low", "high", "detectable"):
            key = prefix if field == "mean" else f"{prefix}_{field}"
            out[key] = None if difference is None else getattr(difference, field)
        out[f"{prefix}_is_resolved"] = None if difference is None or difference.low is None else difference.is_resolved
    return out


def _seed_cell(row: Row) -> str:
    total, used = len(row.group.runs), len(row.seeds_used)
    return f"{total}" if used in (total, 0) else f"{used} of {total}"


def _estimate_cell(value: Estimate | None, row: Row) -> str:
    if value is None:
        return "–"
    spread = "" if value.sd is None else f" ± {value.sd:.3f}"
    return f"{value.mean:.4f}{spread}" + ("" if row.is_final else "*")


def _difference_cell(value: Comparison | None) -> str:
    if value is None:
        return "–"
    return interval(value.loss) + ("" if value.is_final else f" at step {value.at_step}")


def _reference_cell(row: Row, baseline: str, is_full: bool) -> str:
    c = row.against_reference
    if c is None:
        return "–"
    if not is_full and row.against_baseline is not None and c.reference == row.against_baseline.reference:
        return f"(is {baseline})"
    return f"{c.reference}: {_difference_cell(c)}"
