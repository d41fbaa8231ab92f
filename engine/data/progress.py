"""Progress of a long job as plain lines, readable in a log file. Standard library only."""

from __future__ import annotations

import sys
import time


class Progress:
    """Plain lines on stderr, at most one every ``every_s`` seconds; a short job prints none."""

    def __init__(self, every_s: float = 2.0) -> None:
        self._every_s = every_s
        self._phase, self._total_bytes, self._done_bytes, self._documents = "", 0, 0, 0
        self._started = self._last = time.monotonic()

    def say(self, line: str) -> None:
        """Print a line now."""
        print(f"prepare: {line}", file=sys.stderr, flush=True)

    def phase(self, name: str, total_bytes: int) -> None:
        """Start counting towards ``total_bytes`` under a verb such as "read"."""
        self._phase, self._total_bytes, self._done_bytes, self._documents = name, total_bytes, 0, 0
        self._started = time.monotonic()

    def add(self, n_bytes: int) -> None:
        """Count one document."""
        self._done_bytes += n_bytes
        self._documents += 1
        now = time.monotonic()
        if now - self._last < self._every_s:
            return
        self._last = now
        rate = self._done_bytes / max(now - self._started, 1e-9)
        share = f" ({100 * self._done_bytes / self._total_bytes:.0f} %)" if self._total_bytes else ""
        self.say(
            f"{self._phase} {self._done_bytes / 1e6:.1f} of {self._total_bytes / 1e6:.1f} MB{share}, "
            f"{self._documents:,} documents, {rate / 1e6:.1f} MB/s"
        )
