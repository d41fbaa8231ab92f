"""The quantise kernels compiled for GPUs that are not here: nothing spilled, nothing flushed, wide accesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

USED_BY_LPT = (
    "QDQ rows",
    "QDQ rows, SR",
    "QDQ columns, Hadamard",
    "QDQ columns, Hadamard, SR",
    "QDQ tiles",
    "quantise rows",
    "two orientations",
)


@pytest.mark.parametrize(
    ("target", "cases"),
    [
        ("cuda:90", USED_BY_LPT),
        pytest.param("cuda:90", None, marks=pytest.mark.soak),
        pytest.param("hip:gfx950", None, marks=pytest.mark.soak),
    ],
)
def test_quantise_kernels_do_not_spill_or_flush(target: str, cases: tuple[str, ...] | None, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "engine.kernels.quantise_lowering", "--json", "--target", target]
    if cases:
        command += ["--case", *cases]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == (len(cases) if cases else 21)
    for row in rows:
        assert row["target"] == target
        assert row["spills"] == 0, row
        assert row["local_bytes"] == 0, row
        assert 0 < row["registers"] <= 256, row
        assert row["flushes"] == 0, row
        # Narrow only for a transform, where a thread takes single values or pairs of all 32 rows, or permuted ones.
        if target == "cuda:90" and not row["case"].startswith(("QDQ rows, Hadamard", "QDQ columns, Hadamard")):
            assert row["widest_access"] == 16, row
