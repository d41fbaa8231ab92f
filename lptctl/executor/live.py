"""The live view of a launch in a terminal: one row a running run, an overall bar, messages above."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lptctl.executor.local import duration
from lptctl.state import RunStatus


def bar(fraction: float, width: int) -> Text:
    """Return a bar of ``width`` characters."""
    full = round(min(1.0, max(0.0, fraction)) * width)
    return Text.assemble(("━" * full, "green"), ("─" * (width - full), "bright_black"))


class RichDisplay:
    """Implements ``lptctl.executor.local.Display`` with rich; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> RichDisplay:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def state(self, run_id: str, text: str) -> None:
        """Print a line above the live view."""
        self._console.print(Text.assemble((run_id, "bold"), f"  {text}"))

    def progress(self, running: dict[str, tuple[RunStatus, int]], done: int, total: int) -> None:
        """Redraw the live view."""
        wide = self._console.width >= 100
        width = 24 if wide else 10
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for _ in range(5 if wide else 4):
            table.add_column(justify="right", no_wrap=True)
        for run_id, (status, steps) in running.items():
            eta = status.eta_s(steps)
            row = [
                Text(run_id),
                bar(status.step / steps, width),
                Text(f"{status.step}/{steps}"),
                Text("" if status.loss is None else f"loss {status.loss:.4f}"),
                Text("" if status.tps is None else f"{status.tps:,.0f} tok/s"),
                Text("starting" if eta is None else f"ETA {duration(eta)}"),
            ]
            table.add_row(*(row if wide else [*row[:4], row[5]]))
        table.add_row(Text(f"{done} of {total} runs done", style="bold"), bar(done / max(1, total), width))
        self._live.update(table)
