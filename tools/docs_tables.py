"""Write the generated tables of the docs between their markers. ``--check`` only compares (a test calls it)."""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from pathlib import Path

from engine.recipes.table import Switches
from engine.strict import describe
from lptctl.fielddocs import field_docs
from lptctl.settings import LEAVES, NOT_IDENTITY, SECTIONS

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- begin: make docs-tables -->\n", "<!-- end -->"


def keys_table() -> str:
    """Return a Markdown table with every key of a sweep file."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    lines.append(
        "| `seed` | integer | needed | Seeds initial weights, data order, stochastic rounding, Hadamard draws. |"
    )
    for section, cls in SECTIONS.items():
        for owner in (cls, Switches) if section == "recipe" else (cls,):
            docs, hints = field_docs(owner), typing.get_type_hints(owner)
            for field in dataclasses.fields(owner):
                key = f"{section}.{field.name}"
                if key not in LEAVES:
                    continue
                lines.append(
                    f"| `{key}` | {_type(hints[field.name])} | {_default(field, key)} | {_cell(docs, field.name)} |"
                )
    lines += ["", f"Not part of the run id, so not to be swept: `{'.*`, `'.join(NOT_IDENTITY)}.*`.", ""]
    return "\n".join(lines)


def _type(hint: object) -> str:
    return describe(hint).replace("|", "\\|")


def _default(field: dataclasses.Field[object], key: str) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "the preset's" if key.startswith("model.") and key != "model.name" else "needed"
    if key.startswith("recipe.") and key.partition(".")[2] in typing.get_type_hints(Switches):
        return "the preset's"
    if value is None or isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    shown = list(value) if isinstance(value, tuple) else value
    return f"`{shown}`"


def _cell(docs: dict[str, str], name: str) -> str:
    return docs[name].replace("``", "`").replace("|", "\\|")


def main() -> int:
    """Update or check docs/sweep-file.md; return 1 if the check fails."""
    path = ROOT / "docs" / "sweep-file.md"
    text = path.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    wanted = f"{head}{BEGIN}{keys_table()}{END}{rest.split(END, 1)[1]}"
    if "--check" in sys.argv[1:]:
        if text != wanted:
            print(f"{path.relative_to(ROOT)} is out of date; run: make docs-tables", file=sys.stderr)
            return 1
        return 0
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
