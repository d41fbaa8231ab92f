"""The packed GEMMs compiled for GPUs that are not here: which matrix instruction, and nothing spilled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

INSTRUCTIONS = {
    "hip:gfx950": r"v_mfma_scale_f32_\d+x\d+x\d+_f8f6f4",
    # Triton 3.6 writes scale_vec::2X, 3.9 its alias block32.
    "cuda:100": r"tcgen05\.mma\.cta_group::1\.kind::mxf4\.block_scale\.(scale_vec::2X|block32)",
}
CASES = ("fprop", "dgrad", "wgrad", "grouped_fprop", "grouped_dgrad", "grouped_wgrad")


@pytest.mark.parametrize("target", list(INSTRUCTIONS))
def test_packed_gemms_use_the_scaled_matrix_unit_and_do_not_spill(target: str, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "engine.kernels.lowering", "--json", "--target", target]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["case"] for row in rows] == list(CASES)
    for row in rows:
        assert row["target"] == target
        # The only matrix instruction there is: no part of the product fell back to upcasting.
        assert len(row["instructions"]) == 1, row
        assert re.fullmatch(INSTRUCTIONS[target], row["instructions"][0]), row
        assert row["spills"] == 0, row
        assert row["local_bytes"] == 0, row
        assert 0 < row["registers"] <= 256, row
        assert 0 < row["shared_bytes"] <= 160 * 1024, row
