"""Prepare a corpus: ``python -m engine.data prepare --source S --tokenizer byte|bpe:N --out DIR [--json]``.

Exit codes: 0 prepared (or there already), 64 bad sources or options, 1 output that cannot be written, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from pathlib import Path
from typing import TextIO

from engine.config import ConfigError, DataConfig, Problem
from engine.data.sources import is_prepared, resolve_source

FAILED, CONFIG, INTERRUPTED = 1, 64, 130
SHOWN = 50
NEXT_STEP = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space in your quota",
    errno.EROFS: "give an --out on a file system that can be written",
    errno.EACCES: "make it writable, or give another --out,",
    errno.ENAMETOOLONG: "give a shorter name",
}


class _Parser(argparse.ArgumentParser):
    """argparse with the engine's exit code for bad usage."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(CONFIG, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    defaults = DataConfig()
    parser = _Parser(prog="python -m engine.data", description="Corpora for the trainer.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare", help="turn sources into token shards", description="Turn sources into token shards."
    )
    prepare.add_argument(
        "--source",
        action="append",
        required=True,
        help="stdlib (this Python's standard library), a text file, a glob (** crosses folders), a .jsonl file, or one "
        "prepared folder; repeat for more",
    )
    prepare.add_argument(
        "--tokenizer", default=defaults.tokenizer, help="byte, or bpe:N for a BPE of N entries (default: byte)"
    )
    prepare.add_argument(
        "--text-key", default=defaults.text_key, help="key of the text in JSONL records (default: text)"
    )
    prepare.add_argument(
        "--val-fraction",
        type=float,
        default=defaults.val_fraction,
        help="share of the documents held out (default: 0.05)",
    )
    prepare.add_argument("--out", type=Path, required=True, help="folder to make")
    prepare.add_argument("--force", action="store_true", help="replace a folder that holds another corpus")
    prepare.add_argument("--json", action="store_true", help="print one line of JSON instead of the summary")
    return parser


def _flag(problem: Problem) -> str:
    """Say a problem in terms of the command line: ``--val-fraction: ...``."""
    where = f"--{str(problem.path[0]).replace('_', '-')}: " if problem.path and problem.path != ("data", "path") else ""
    return f"{where}{problem.message}" + (f" ({problem.hint})" if problem.hint else "")


def _report(error: ConfigError) -> int:
    for problem in error.problems[:SHOWN]:
        print(f"engine.data: {_flag(problem)}", file=sys.stderr)
    if len(error.problems) > SHOWN:
        print(f"engine.data: and {len(error.problems) - SHOWN} more problems", file=sys.stderr)
    return CONFIG


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        _never_fail_on_names(stream)
    args = _parser().parse_args(argv)
    try:
        config = DataConfig(
            source=tuple(args.source),
            tokenizer=args.tokenizer,
            text_key=args.text_key,
            val_fraction=args.val_fraction,
        )
    except ConfigError as error:
        problems = list(error.problems)
        for given in args.source:
            if not is_prepared(Path(given)):
                resolve_source(given, problems)
        return _report(ConfigError(problems))
    try:
        from engine.data.prepare import prepare

        meta, cached = prepare(config, args.out, force=args.force)
    except ConfigError as error:
        return _report(error)
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "tokenizers"):
            raise
        print(
            f"engine.data: {sys.executable} has no {error.name}, which preparing data needs; "
            "install it with: pip install 'lptctl[engine]'",
            file=sys.stderr,
        )
        return CONFIG
    except OSError as error:
        print(
            f"engine.data: {error.strerror or error}: {error.filename or args.out}; nothing half-made was left; "
            f"{NEXT_STEP.get(error.errno or 0, 'mend it')} and run the same command again",
            file=sys.stderr,
        )
        return FAILED
    except KeyboardInterrupt:
        print("engine.data: interrupted; nothing half-made was left", file=sys.stderr)
        return INTERRUPTED
    out = Path(os.path.realpath(args.out))
    if args.json:
        print(json.dumps(meta.summary(out)))
        return 0
    documents = meta.n_documents.train + meta.n_documents.val
    print(f"{out}: {'there already' if cached else 'prepared'}, digest {meta.digest}")
    print(
        f"  {documents:,} documents ({meta.n_documents.val:,} held out; dropped {meta.n_duplicates:,} duplicates, "
        f"{meta.n_empty:,} empty), {(meta.bytes.train + meta.bytes.val) / 1e6:.1f} MB of text"
    )
    print(
        f"  {meta.n_train_tokens:,} training and {meta.n_val_tokens:,} validation tokens, {meta.tokenizer}, "
        f"vocabulary {meta.vocab_size:,}, {meta.dtype}"
    )
    print(f"  unigram entropy {meta.unigram_entropy:.4f} nats per token: a trained model must end below it")
    return 0


def _never_fail_on_names(stream: TextIO) -> None:
    """Print a file name that is no valid text escaped instead of failing."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
