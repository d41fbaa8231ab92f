"""Entry point of the ``lptctl`` command and of ``python -m lptctl``."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command line; errors become one clear message and an exit code."""
    from lptctl.cli import run

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 gets escapes instead of a traceback
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
