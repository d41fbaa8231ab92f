"""Small real runs for tests: a corpus, a run directory, and the engine as a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.config import RunConfig, RunPaths, dump_run, from_dict, read_lines, resolve_model, resolve_recipe

ROOT = Path(__file__).resolve().parents[2]
TINY_MODEL = {"name": "llama3_nano", "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 64}


def engine_env() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def prepare_corpus(folder: Path) -> Path:
    """Prepare a small byte corpus of real text (this project's own sources) below ``folder``."""
    out = folder / "corpus"
    subprocess.run(
        [
            sys.executable, "-m", "engine.data", "prepare", "--source", str(ROOT / "engine" / "**" / "*.py"),
            "--tokenizer", "byte", "--val-fraction", "0.2", "--out", str(out), "--json",
        ],
        check=True, env=engine_env(), capture_output=True, timeout=120,
    )  # fmt: skip
    return out


def make_config(corpus: Path, *, recipe: Any = "lpt", seed: int = 1, **sections: Any) -> RunConfig:
    """A run of a tiny model on the corpus; ``sections`` update training, optimizer, checkpoint, ..."""
    tree: dict[str, Any] = {
        "sweep": "test",
        "run_id": "run",
        "seed": seed,
        "recipe": resolve_recipe(recipe),
        "model": resolve_model(TINY_MODEL),
        "data": {"source": [str(corpus)], "path": str(corpus)},
        "training": {
            "steps": 12, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 4, "compute_dtype": "float32",
        },
        "optimizer": {"lr": 1e-2},
        "validation": {"every": 4, "batches": 2},
        "checkpoint": {"every": 3, "keep": 2},
        "runtime": {"threads": 1, "tensorboard": False, "device": "cpu"},
    }  # fmt: skip
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return from_dict(RunConfig, tree)


def make_run(folder: Path, config: RunConfig) -> RunPaths:
    folder.mkdir(parents=True, exist_ok=True)
    paths = RunPaths(folder)
    paths.run_json.write_text(dump_run(config))
    return paths


def start_engine(paths: RunPaths) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "engine.train", "--run", str(paths.run_json)],
        env=engine_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run_engine(paths: RunPaths, *, timeout_s: float = 120) -> tuple[int, str]:
    """Run one attempt to its end; return the exit code and the output."""
    process = start_engine(paths)
    output, _ = process.communicate(timeout=timeout_s)
    return process.returncode, output


def records(paths: RunPaths) -> list[dict[str, Any]]:
    return list(read_lines(paths.metrics))


def events(paths: RunPaths, kind: str | None = None) -> list[dict[str, Any]]:
    return [e for e in read_lines(paths.events) if kind is None or e["kind"] == kind]


def stitched(paths: RunPaths) -> dict[int, dict[str, Any]]:
    """Step -> record; of a step run twice the last attempt wins."""
    return {r["step"]: r for r in sorted(records(paths), key=lambda r: r["attempt"])}
