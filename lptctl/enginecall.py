"""How this control plane starts the engine's programs: as ``python -m engine.…``, never by importing torch."""

from __future__ import annotations

import os
from pathlib import Path

import engine


def engine_environment(home: Path | None = None) -> dict[str, str]:
    """Return the environment in which ``python -m engine.…`` is the engine below ``home``, whatever folder is current.

    ``home`` defaults to the folder of the installed engine; a sweep's runs use the sweep's snapshot.
    """
    first = str(home or Path(str(engine.__file__)).parent.parent)
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": first + (os.pathsep + before if before else "")}
