"""The sweep file: its outer shape (pydantic), checked before anything is expanded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.config import Problem, did_you_mean
from lptctl.yamlfile import Located, SweepFileError, YamlFile

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SweepBlock(_Strict):
    """One block of runs: the product of ``grid`` and ``zip``, less ``exclude``, plus ``include``."""

    grid: dict[str, Any] = Field(default={}, description="Key -> list of values; the product of all lists.")
    zip: list[dict[str, Any]] = Field(default=[], description="Each entry: keys whose lists move together.")
    exclude: list[dict[str, Any]] = Field(default=[], description="Points to leave out; all keys of an entry must match.")
    include: list[dict[str, Any]] = Field(default=[], description="Extra single points; may add keys.")


class LocalSpec(_Strict):
    """The local executor."""

    workers: int | None = Field(default=None, ge=1, description="Runs at a time; null: cores // threads.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of one run; null: cores // workers.")


class SweepSpec(_Strict):
    """A sweep file."""

    version: Literal[1] = Field(description="Version of this file format.")
    name: str = Field(description="Folder of the sweep below RUNS: letters, digits, dot, underscore, dash.")
    executor: Literal["local"] = Field(default="local", description="Where runs execute; local is the only one so far.")
    base: dict[str, Any] = Field(default={}, description="Settings of every run, dotted or nested.")
    sweep: list[SweepBlock] = Field(description="One block, or a list of blocks (their union).")
    local: LocalSpec = Field(default=LocalSpec(), description="Settings of the local executor.")
    allow_unpaired: bool = Field(default=False, description="Allow recipes that share no seed and settings.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepFile:
    """A sweep file that has the right outer shape."""

    source: YamlFile
    """The text, for positions."""
    spec: SweepSpec
    """The checked content."""
    single_block: bool
    """``sweep:`` was one mapping and not a list (positions differ)."""

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self.source.path

    def block_path(self, index: int) -> tuple[str | int, ...]:
        """Return the YAML path of a block."""
        return ("sweep",) if self.single_block else ("sweep", index)


def load_sweep_file(path: Path) -> SweepFile:
    """Read and check the outer shape of a sweep file.

    Raises:
        UsageError: with every problem, its line and a caret.
    """
    source = YamlFile(path)
    data = source.data
    if not isinstance(data, dict):
        problem = Problem(path=(), message="a sweep file is a mapping", hint="`lptctl sweep new` writes one to start from")
        raise SweepFileError(source, [Located(problem=problem, position=None)])
    single = isinstance(data.get("sweep"), dict)
    try:
        spec = SweepSpec.model_validate({**data, "sweep": [data["sweep"]]} if single else data)
    except ValidationError as error:
        located = []
        for item in error.errors():
            loc = tuple(item["loc"])
            if single and loc[:2] == ("sweep", 0):
                loc = ("sweep", *loc[2:])
            problem = _problem(loc, item)
            located.append(Located(problem=problem, position=source.position(loc, on_key=problem.on_key)))
        raise SweepFileError(source, located) from None
    if not NAME.fullmatch(spec.name):
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", spec.name).strip("-.")[:64] or "my-sweep"
        problem = Problem(
            path=("name",),
            message=f'"{spec.name}" cannot be a folder name; expected letters, digits, ".", "_" and "-", at most 64',
            hint=f"for example {slug}",
        )
        raise SweepFileError(source, [Located(problem=problem, position=source.position(("name",)))])
    return SweepFile(source=source, spec=spec, single_block=single)


def _problem(loc: tuple[str | int, ...], item: Any) -> Problem:
    """Put a pydantic error into our words."""
    kind, value = item["type"], item["input"]
    shown = f'"{value}"' if isinstance(value, str) else ("null" if value is None else str(value))
    if kind == "extra_forbidden":
        model = {1: SweepSpec, 2: LocalSpec}.get(len(loc), SweepBlock) if loc[0] != "sweep" else SweepBlock
        known = list((SweepSpec if len(loc) == 1 else model).model_fields)
        hint = did_you_mean(str(loc[-1]), known) or "known keys: " + ", ".join(known)
        return Problem(path=loc, message="unknown key", hint=hint, on_key=True)
    if kind == "missing":
        fields = SweepSpec.model_fields
        about = fields[str(loc[-1])].description if str(loc[-1]) in fields else ""
        return Problem(path=loc, message="missing", hint=about or "")
    if kind == "literal_error" and loc == ("executor",):
        return Problem(path=loc, message=f'executor {shown} is not available; "local" is the only one so far')
    expected = {
        "dict_type": "a mapping (key: value)",
        "list_type": "a list",
        "int_type": "an integer",
        "bool_type": "true or false",
        "string_type": "text",
        "model_type": "a mapping (key: value)",
    }.get(kind, item["msg"].lower())
    hint = "write it without quotes" if isinstance(value, str) and kind in ("int_type", "bool_type") else ""
    return Problem(path=loc, message=f"{shown} where {expected} is expected", hint=hint)
