"""The JSON schema of the sweep file, for editors: the outer shape plus the engine's configuration."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from engine.config import MODELS
from engine.recipes.table import RECIPES, Switches
from lptctl.fielddocs import field_docs
from lptctl.settings import NOT_FOR_USERS, SECTIONS
from lptctl.spec import SweepSpec


def _described(cls: Any) -> dict[str, Any]:
    """Return a class's schema with its fields' docstrings, which editors show on hover."""
    schema: dict[str, Any] = TypeAdapter(cls).json_schema()
    for field, text in field_docs(cls).items():
        schema["properties"][field]["description"] = text
    return schema


def _section(name: str, cls: Any) -> dict[str, Any]:
    schema = _described(cls)
    schema.pop("required", None)  # presets and other blocks fill the rest
    schema["additionalProperties"] = False
    for key in NOT_FOR_USERS:
        section, _, field = key.partition(".")
        if section == name:
            schema["properties"].pop(field, None)
    if name == "recipe":
        switches = _described(Switches)["properties"]
        schema.pop("$defs", None)
        schema["properties"].update(switches)
        schema["properties"]["name"] = {"enum": list(RECIPES)}
        return {"anyOf": [{"enum": list(RECIPES)}, schema]}
    if name == "model":
        schema["properties"]["name"] = {"enum": list(MODELS)}
        return {"anyOf": [{"enum": list(MODELS)}, schema]}
    if name == "data":
        schema["properties"]["source"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return schema


def sweep_schema() -> dict[str, Any]:
    """Return the schema; dotted keys (``optimizer.lr``) and nested mappings are both known."""
    schema: dict[str, Any] = SweepSpec.model_json_schema()
    properties: dict[str, Any] = {"seed": {"type": "integer", "minimum": 0}}
    for name, cls in SECTIONS.items():
        section = _section(name, cls)
        properties[name] = section
        fields = section["anyOf"][1]["properties"] if "anyOf" in section else section["properties"]
        properties.update({f"{name}.{field}": value for field, value in fields.items()})
    settings = {"type": "object", "properties": properties, "additionalProperties": False}
    lists = {
        "type": "object",
        "properties": {
            key: {"anyOf": [{"type": "array", "items": value, "minItems": 1}, {"type": ["number", "boolean", "null"]}]}
            for key, value in properties.items()
        },
        "additionalProperties": False,
    }
    schema["properties"]["base"] = settings
    block = schema["$defs"]["SweepBlock"]["properties"]
    block["grid"] = lists
    block["zip"] = {"type": "array", "items": lists}
    block["exclude"] = block["include"] = {"type": "array", "items": settings}
    reference = {"$ref": "#/$defs/SweepBlock"}
    schema["properties"]["sweep"] = {"anyOf": [reference, {"type": "array", "items": reference}]}
    schema["title"] = "lptctl sweep file"
    return schema
