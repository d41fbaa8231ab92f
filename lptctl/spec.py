"""The sweep file: its outer shape (pydantic), checked before anything is expanded."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.config import Problem, did_you_mean
from lptctl.yamlfile import Located, SweepFileError, YamlFile, YamlPath

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SweepBlock(_Strict):
    """One block of runs: the product of ``grid`` and ``zip``, less ``exclude``, plus ``include``."""

    grid: dict[str, Any] = Field(default={}, description="Key -> list of values; the product of all lists.")
    zip: list[dict[str, Any]] = Field(default=[], description="Each entry: keys whose lists move together.")
    exclude: list[dict[str, Any]] = Field(
        default=[], description="Points to leave out; all keys of an entry must match."
    )
    include: list[dict[str, Any]] = Field(default=[], description="Extra single points; may add keys.")


class LocalSpec(_Strict):
    """The local executor."""

    workers: int | None = Field(default=None, ge=1, description="Runs at a time; null: cores // threads.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of one run; null: cores // workers.")


class SweepSpec(_Strict):
    """A sweep file."""

    version: Literal[1] = Field(description="Version of this file format; 1 is the only one.")
    name: str = Field(description="Folder of the sweep below RUNS: letters, digits, dot, underscore, dash.")
    executor: Literal["local"] = Field(default="local", description="Where runs execute; local is the only one so far.")
    base: dict[str, Any] = Field(default={}, description="Settings of every run, dotted or nested.")
    sweep: list[SweepBlock] = Field(min_length=1, description="One block, or a list of blocks (their union).")
    local: LocalSpec = Field(default=LocalSpec(), description="Settings of the local executor.")
    allow_unpaired: bool = Field(default=False, description="Allow recipes that share no seed and settings.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFile:
    """A sweep file, its outer shape checked."""

    source: YamlFile
    """The text, for positions."""
    spec: SweepSpec
    """The content that has the right shape."""
    single_block: bool
    """``sweep:`` was one mapping and not a list (positions differ)."""
    problems: tuple[Located, ...]
    """What is wrong with the shape; the wrong parts are left out of ``spec``, so that the rest is checked as well."""

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self.source.path

    @property
    def is_whole(self) -> bool:
        """Whether no part of ``sweep`` was left out, so that nothing seems missing only because of another error."""
        return not any(item.problem.path[:1] == ("sweep",) for item in self.problems)

    def block_path(self, index: int) -> YamlPath:
        """Return the YAML path of a block."""
        return ("sweep",) if self.single_block else ("sweep", index)

    def checked(self) -> SweepFile:
        """Return the file itself.

        Raises:
            SweepFileError: if its shape is wrong.
        """
        if self.problems:
            raise SweepFileError(self.source, self.problems)
        return self


def load_sweep_file(path: Path) -> SweepFile:
    """Read a sweep file and check its outer shape.

    Raises:
        UsageError: if it cannot be read, is no YAML or no mapping. Wrong parts are in ``problems``.
    """
    source = YamlFile(path)
    data = source.data
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else f"the file holds {_show(data)}"
        problem = Problem(
            path=(), message=f"{what}; a sweep file is a mapping", hint="`lptctl sweep new` writes one to start from"
        )
        raise SweepFileError(source, [Located(problem=problem, position=source.position(()))])
    data = dict(data)
    if isinstance(data.get("name"), (int, float, bool)) and source.token(("name",)) is not None:
        data["name"] = source.token(("name",))  # name: 2026 or 007 is text, as written
    single = isinstance(data.get("sweep"), dict)
    if single:
        data["sweep"] = [data["sweep"]]
    located: list[Located] = []
    try:
        spec = SweepSpec.model_validate(data)
    except ValidationError as error:
        for item in error.errors():
            loc = tuple(item["loc"])
            problem = _problem(loc, item)
            if single and loc[:2] == ("sweep", 0):
                loc = ("sweep", *loc[2:])
                problem = Problem(path=loc, message=problem.message, hint=problem.hint, on_key=problem.on_key)
            located.append(Located(problem=problem, position=source.position(loc, on_key=problem.on_key)))
        spec = SweepSpec.model_validate(_sound_part(data, [tuple(item["loc"]) for item in error.errors()]))
    if not NAME.fullmatch(spec.name):
        problem = Problem(
            path=("name",),
            message=f'"{spec.name}" cannot be a folder name; expected letters, digits, ".", "_" and "-", at most 64, '
            "the first a letter or digit",
            hint=f"for example {_folder_name(spec.name)}",
        )
        located.append(Located(problem=problem, position=source.position(("name",))))
    return SweepFile(source=source, spec=spec, single_block=single, problems=tuple(located))


def _folder_name(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text.replace("ß", "ss")).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:64] or "my-sweep"


def _sound_part(data: Mapping[str, Any], wrong: list[tuple[str | int, ...]]) -> dict[str, Any]:
    """Return a copy of the file's content without what is wrong; required keys get a value that does no harm."""
    harmless: dict[str, Any] = {"version": 1, "name": "unnamed", "sweep": [{}]}
    out = {key: value for key, value in data.items() if (key,) not in wrong}
    for top in {loc[0] for loc in wrong if len(loc) > 1}:
        if top == "sweep":
            blocks = [block if isinstance(block, dict) else {} for block in out["sweep"]]
            bad = {loc[1:3] for loc in wrong if loc[0] == "sweep" and len(loc) > 2}
            out["sweep"] = [{k: v for k, v in b.items() if (i, k) not in bad} for i, b in enumerate(blocks)]
        else:
            out[str(top)] = {k: v for k, v in data[str(top)].items() if (top, k) not in {loc[:2] for loc in wrong}}
    return {**harmless, **out}


_EXPECTED = {
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "list_type": "a list",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "bool_type": "true or false",
    "string_type": "text",
}


def _show(value: Any) -> str:
    shown = f'"{value}"' if isinstance(value, str) else "null" if value is None else str(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _problem(loc: YamlPath, item: Any) -> Problem:
    """Put a pydantic error into our words."""
    kind, value = item["type"], item["input"]
    name = str(loc[-1])
    if kind == "extra_forbidden":
        inner = {"sweep": SweepBlock.model_fields, "local": LocalSpec.model_fields}
        known = list(inner[str(loc[0])] if len(loc) > 1 else SweepSpec.model_fields)
        hint = did_you_mean(name, known) or "known keys: " + ", ".join(known)
        return Problem(path=loc, message="unknown key", hint=hint, on_key=True)
    if kind == "missing":
        return Problem(path=loc, message="missing", hint=SweepSpec.model_fields[name].description or "")
    if kind == "literal_error" and loc == ("executor",):
        return Problem(path=loc, message=f'executor {_show(value)} is not available; "local" is the only one so far')
    if kind == "literal_error" and loc == ("version",):
        return Problem(path=loc, message=f"{_show(value)} is no version this lptctl reads; expected 1")
    if kind == "greater_than_equal":
        return Problem(path=loc, message=f"{value} must be at least {item['ctx']['ge']}")
    if kind == "too_short":
        return Problem(
            path=loc, message="an empty list of blocks", hint="at least: grid: {recipe: [bf16, lpt], seed: [1]}"
        )
    if loc == ("sweep",):
        return Problem(
            path=loc, message=f"{_show(value)} where a block (grid, zip, ...) or a list of blocks is expected"
        )
    hint = ""
    if isinstance(value, str) and kind in ("int_type", "bool_type"):
        hint = "a clock time is text in YAML 1.2" if ":" in value else "write it without quotes"
    if isinstance(value, str) and kind == "list_type":
        hint = f"write [{value}]"
    if isinstance(value, dict) and kind == "list_type":
        hint = f"put it in brackets: {name}: [{{...}}]"
    return Problem(path=loc, message=f"{_show(value)} where {_EXPECTED.get(kind, item['msg'])} is expected", hint=hint)
