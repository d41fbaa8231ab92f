"""What can go wrong, and the exit code each case has (docs: README, "Exit codes")."""

from __future__ import annotations

OK, FAILED, USAGE, INCONCLUSIVE, WARNINGS, INTERRUPTED = 0, 1, 2, 3, 4, 130


class LptError(Exception):
    """An error for the user: a message with what, where, the value, what was expected and the next step."""

    exit_code = FAILED


class UsageError(LptError):
    """The command or a file it reads is wrong; nothing was started."""

    exit_code = USAGE
