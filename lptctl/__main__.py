"""Entry point of the ``lptctl`` command and of ``python -m lptctl``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; errors become one clear message and an exit code."""
    from lptctl.cli import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
