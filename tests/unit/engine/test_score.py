"""The operator score: against the published forward figure, an exact recipe, and the page it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine.config import RecipeConfig
from engine.recipes.score import Score, main, score_recipe
from engine.recipes.table import RECIPES
from tests.helpers.runs import ROOT


def scores(name: str, *, dy_is_output: bool = False) -> dict[str, Score]:
    recipe = RecipeConfig(name=name, switches=RECIPES[name].switches)
    found = score_recipe(recipe, tokens=512, k=512, n=512, draws=2, share=0.005, gain=100.0, dy_is_output=dy_is_output)
    return {s.gemm: s for s in found}


def test_forward_of_1d_activations_and_2d_weights_is_near_the_published_13_5_db() -> None:
    assert scores("wblock2d")["fprop"].snr_db == pytest.approx(13.5, abs=0.5)


def test_unquantised_products_are_exact_to_fp32() -> None:
    assert all(s.snr_db > 110 for s in scores("bf16").values())


def test_gradients_of_the_layers_own_output_carry_its_error() -> None:
    apart, chained = scores("full_precision_backward"), scores("full_precision_backward", dy_is_output=True)
    for gemm in ("dgrad", "wgrad"):
        assert chained[gemm].snr_db < apart[gemm].snr_db - 2
    assert chained["fprop"] == apart["fprop"]


def test_page_keeps_its_text_and_its_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: begin -->\nold\n<!-- generated: end -->\nafter\n")
    small = ["--recipes", "baseline", "--tokens", "64", "--k", "64", "--n", "64", "--draws", "1"]
    assert main([*small, "--out", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert len(re.findall(r"^\| baseline \|", text, re.MULTILINE)) == 2
    page.write_text("no markers")
    assert main([*small, "--out", str(page)]) == 64
    assert page.read_text() == "no markers"
    capsys.readouterr()
    assert main([*small, "--json"]) == 0
    assert {row["gemm"] for row in json.loads(capsys.readouterr().out)} == {"fprop", "dgrad", "wgrad"}
    assert main(["--recipes", "lptt"]) == 64


def test_the_committed_page_has_every_recipe() -> None:
    text = (ROOT / "docs" / "operator-table.md").read_text(encoding="utf-8")
    for name in RECIPES:
        assert len(re.findall(rf"^\| {name} \|", text, re.MULTILINE)) == 2, name
