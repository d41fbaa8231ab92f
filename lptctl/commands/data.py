"""``lptctl data``: corpora, made by ``python -m engine.data`` as a program; nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Corpora: text in, token shards out.", no_args_is_help=True)

ENGINE_CONFIG, INTERRUPTED_BY_CTRL_C = 64, (130, -2)


@app.callback()
def data() -> None:
    """Keep ``prepare`` a command of its own, though it is the only one."""


@app.command()
def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="stdlib (the running Python's standard library), text files, globs in quotes (** crosses folders), "
            ".jsonl files, or one prepared folder.",
            show_default=False,
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder to make.", show_default=False)],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer", metavar="byte|bpe:N", help="Bytes, or a byte-level BPE of N entries trained on the text."
        ),
    ] = "byte",
    text_key: Annotated[str, typer.Option("--text-key", help="Key of the text in JSONL records.")] = "text",
    val_fraction: Annotated[
        float, typer.Option("--val-fraction", help="Share of the documents held out, chosen by a hash of their text.")
    ] = 0.05,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that holds another corpus.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the summary.")] = False,
) -> None:
    """Turn text into a folder of token shards that a sweep reads as its data.source.

    The folder appears whole or not at all; the same command again returns at once.
    """
    import signal

    from lptctl.errors import FAILED, INTERRUPTED, OK, USAGE, LptError

    # One word an option, so that a value that starts with a dash is still its value.
    options = [f"--source={given}" for given in source]
    options += [f"--out={out}", f"--tokenizer={tokenizer}", f"--text-key={text_key}", f"--val-fraction={val_fraction}"]
    options += ["--force"] * force + ["--json"] * as_json
    code = run_engine(["prepare", *options])
    if code in INTERRUPTED_BY_CTRL_C:
        raise typer.Exit(INTERRUPTED)
    if code < 0:
        raise LptError(
            f"data prepare: the engine was killed by {signal.Signals(-code).name} (SIGKILL is often the kernel, out of "
            f"memory: see dmesg); {out} is as it was; run the same command again"
        )
    raise typer.Exit({0: OK, ENGINE_CONFIG: USAGE}.get(code, FAILED))


def run_engine(arguments: list[str]) -> int:
    """Run ``python -m engine.data`` with our streams and return its exit code (negative: killed by that signal).

    The engine is the one next to this package, whatever the current folder holds; the folder itself stays, because
    relative sources start there.
    """
    import subprocess
    import sys

    from lptctl.enginecall import engine_environment

    command = [sys.executable, "-m", "engine.data", *arguments]
    with subprocess.Popen(command, env=engine_environment()) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the terminal told the engine too; it cleans up, then leaves
                continue
