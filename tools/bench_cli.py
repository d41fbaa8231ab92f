"""Start-up of ``lptctl --help`` against a bare typer app, interleaved, and ``plan`` of 10,000 runs.

Writes docs/benchmarks/cli.md. ``--rounds`` sets how often each command runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.machine import describe_machine, write_page

ROOT = Path(__file__).resolve().parent.parent
BARE = '''\
import typer

app = typer.Typer()


@app.command()
def one(name: str) -> None:
    """Do one thing."""


@app.command()
def two(count: int = 1) -> None:
    """Do another thing."""


app()
'''
SWEEP = """\
version: 1
name: big
base:
  model: llama3_nano
  training: {steps: 100}
sweep:
  grid:
    recipe: [bf16, baseline, lpt, midmax, uos]
    optimizer.lr: [%s]
    training.seq_len: [128, 256]
    seed: [%s]
"""


def seconds(argv: list[str]) -> float:
    """Return the wall time of a command that must succeed."""
    started = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - started


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE)
        big = Path(folder) / "big.yaml"
        big.write_text(SWEEP % (", ".join(f"{i}e-4" for i in range(1, 11)), ", ".join(map(str, range(100)))))
        commands = {
            "bare typer app `--help`": [sys.executable, str(bare), "--help"],
            "`lptctl --help`": [sys.executable, "-m", "lptctl", "--help"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for argv in commands.values():  # compile the bytecode
            seconds(argv)
        for _ in range(rounds):
            for name, argv in commands.items():
                times[name].append(seconds(argv))
        plan_argv = [sys.executable, "-m", "lptctl", "sweep", "plan", str(big), "--runs", folder, "--all", "--json"]
        planned = subprocess.run(plan_argv, check=True, capture_output=True, text=True, cwd=ROOT).stdout
        count = planned.count('"run_id"')
        plan_s = [seconds(plan_argv) for _ in range(5)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    base, ours = medians.values()
    rows = [f"| {name} | {value * 1e3:.0f} ms | {value / base:.2f} |" for name, value in medians.items()]
    lines = [
        "# Start-up of the command line",
        "",
        f"`make bench-cli` on {describe_machine()}; medians of {rounds} interleaved runs.",
        "",
        "| command | wall time | ratio to the bare app |",
        "|---|---:|---:|",
        *rows,
        "",
        f"`lptctl sweep plan --json` of a file that expands to {count:,} runs: {statistics.median(plan_s):.2f} s, "
        f"median of {len(plan_s)}, start-up included.",
        "",
        f"Targets: ratio at most 1.5 (here {ours / base:.2f}), plan of 10,000 runs under 3 s.",
    ]
    write_page(ROOT / "docs" / "benchmarks" / "cli.md", lines)


if __name__ == "__main__":
    main()
