"""The only place that prints for people: stdout for the product, stderr for talk."""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


@functools.cache
def out() -> Console:
    """Return the console of the product. Piped output has no styles and is never folded."""
    from rich.console import Console

    piped = not sys.stdout.isatty()
    return Console(soft_wrap=piped, highlight=False, width=200 if piped else None)


@functools.cache
def err() -> Console:
    """Return the console for talk: notes, warnings, errors."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=True, highlight=False)


def say(text: str) -> None:
    """Print plain text to stdout."""
    out().print(text, markup=False)


def warn(text: str) -> None:
    """Print a warning or an error to stderr."""
    err().print(text, markup=False)


def print_json(value: Any) -> None:
    """Print JSON for programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
