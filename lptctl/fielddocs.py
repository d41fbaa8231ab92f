"""The docstrings below the fields of a configuration class, which Python itself does not keep."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def field_docs(cls: Any) -> dict[str, str]:
    """Return field -> docstring on one line, for the annotated fields of a class."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            docs[field.target.id] = " ".join(str(text).split())
    return docs
