"""Train one run: ``python -m engine.train --run runs/S/R/run.json [--attempt N]``.

Exit codes: 0 finished, 75 checkpointed and wants to continue, 70 non-finite, 64 configuration, 1 crash
(docs/run-directory.md).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.config import (
    ConfigError,
    Problem,
    RunConfig,
    RunPaths,
    append_event,
    load_run,
    read_lines,
    repair_tail,
)

CRASHED, CONFIG = 1, 64


def next_attempt(paths: RunPaths) -> int:
    """Return one more than the highest attempt in events.jsonl."""
    return 1 + max((event["attempt"] for event in read_lines(paths.events)), default=0)


@contextmanager
def run_lock(path: Path) -> Iterator[None]:
    """Hold the run's lock, so that nobody runs it twice; released by the kernel however the process ends.

    Raises:
        BlockingIOError: if another process holds it.
    """
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()}\n")
        file.flush()
        yield


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or "unknown"
    return platform.processor() or platform.machine()


def write_env(paths: RunPaths, *, attempt: int, device: Any) -> None:
    """Write env.json: machine and software of this attempt."""
    import numpy
    import torch

    env = {
        "attempt": attempt,
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "threads": torch.get_num_threads(),
        "argv": sys.argv,
    }
    temporary = paths.env_json.with_suffix(".tmp")
    temporary.write_text(json.dumps(env, indent=2) + "\n")
    temporary.replace(paths.env_json)


def _pick_device(config: RunConfig) -> Any:
    import torch

    wanted = config.runtime.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError([Problem(path=("runtime", "device"), message="cuda asked for, but torch sees no GPU")])
    use_cuda = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0) if use_cuda else torch.device("cpu")


def _train(config: RunConfig, paths: RunPaths, attempt: int) -> int:
    import torch

    from engine.kernels import kernel_path
    from engine.trainer import NONFINITE, NonFiniteError, Trainer

    for path in (paths.metrics, paths.events):
        removed = repair_tail(path)
        if removed:
            append_event(paths.events, "torn_tail", attempt=attempt, file=path.name, bytes=removed)
    device = _pick_device(config)
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    write_env(paths, attempt=attempt, device=device)
    trainer = Trainer(config, paths, attempt=attempt, device=device)

    def request_stop(signum: int, frame: Any) -> None:
        trainer.stop_requested = True

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, request_stop)
    trainer.resume()
    quantiser = kernel_path(device).why if trainer.recipe.quantised_layers else "nothing is quantised"
    trainer.event(
        "started",
        pid=os.getpid(),
        device=str(device),
        threads=torch.get_num_threads(),
        data_digest=trainer.data.digest,
        unigram_entropy=trainer.data.unigram_entropy,
        init_digest=trainer.init_digest,
        batch_digest=trainer.batch_digest(),
        resumed_from=trainer.step,
        quantised_layers=list(trainer.recipe.quantised_layers),
        quantiser=quantiser,
    )
    print(
        f"run {config.sweep}/{config.run_id}  attempt {attempt}  recipe {config.recipe.name}  device {device}  "
        f"threads {torch.get_num_threads()}  data {trainer.data.digest}  initial weights {trainer.init_digest}  "
        f"first batch {trainer.batch_digest()}  from step {trainer.step} of {config.training.steps}\n"
        f"quantiser: {quantiser}",
        flush=True,
    )
    cause, message = "crash", ""
    try:
        code = trainer.fit()
        cause = "finished" if code == 0 else "stopped"
    except NonFiniteError as error:
        code, cause, message = NONFINITE, "nonfinite", str(error)
        print(message, file=sys.stderr)
    trainer.event(
        "exit", code=code, cause=cause, step=trainer.step, message=message, gemms=trainer.recipe.gemm_counts()
    )
    return code


def _report_failure(paths: RunPaths, attempt: int, code: int, cause: str, message: str) -> None:
    """Put a failure into the log and, if the disk still takes it, into events.jsonl."""
    print(f"engine.train: {message}", file=sys.stderr, flush=True)
    try:
        append_event(paths.events, "exit", attempt=attempt, code=code, cause=cause, step=None, message=message)
    except OSError as error:
        print(f"engine.train: could not write {paths.events}: {error}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run one attempt; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.train", description="Train one run of a sweep.")
    parser.add_argument("--run", type=Path, required=True, help="the run's run.json")
    parser.add_argument("--attempt", type=int, help="number of this attempt (default: one more than the last)")
    args = parser.parse_args(argv)
    paths = RunPaths(args.run.resolve().parent)
    try:
        config = load_run(args.run.read_text())
    except (OSError, ConfigError) as error:
        print(f"engine.train: {args.run}: {error}", file=sys.stderr)
        return CONFIG
    attempt = args.attempt or next_attempt(paths)
    try:
        with run_lock(paths.lock):
            return _train(config, paths, attempt)
    except BlockingIOError:
        holder = paths.lock.read_text().strip() or "unknown"
        print(f"engine.train: {paths.root} is being trained already (pid and host: {holder})", file=sys.stderr)
        return CRASHED
    except ConfigError as error:
        _report_failure(paths, attempt, CONFIG, "config", str(error))
        return CONFIG
    except OSError as error:
        message = (
            f"{error.strerror or error}: {error.filename or paths.root}; free space or make the folder writable, "
            "then launch again: the run continues from its newest checkpoint"
        )
        _report_failure(paths, attempt, CRASHED, "crash", message)
        return CRASHED
    except Exception as error:
        traceback.print_exc()
        _report_failure(paths, attempt, CRASHED, "crash", f"{type(error).__name__}: {error}")
        return CRASHED


if __name__ == "__main__":
    sys.exit(main())
