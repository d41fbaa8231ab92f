"""The compiled CPU path equals the reference bit for bit, and steps aside, saying why, where it cannot be compiled."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import formats
from engine.formats import SCALE_MODES, OperandOptions, make_hadamard
from engine.kernels.cpu import compiled, qdq
from engine.kernels.cpu.build import load
from tests.helpers.runs import ROOT, engine_env

DTYPES = (torch.float32, torch.bfloat16)
KINDS = [("1d", kind) for kind in ("none", "random", "fixed", "3rht")] + [("2d", "none")]
KEY = 0x123456789ABCDEF0


def hard_values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every order of magnitude, subnormals, signed zeros, whole zero blocks, ties, one NaN and one Inf."""
    g = torch.Generator().manual_seed(seed)
    wild = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-149, 127, shape, generator=g).float())
    ties = torch.randint(-24, 25, shape, generator=g) * 0.25
    x = torch.where(torch.rand(shape, generator=g) < 0.5, ties, wild)
    x = torch.where(torch.rand(shape, generator=g) < 0.1, torch.tensor(-0.0), x)
    flat = x.view(-1)
    flat[: len(flat) // 4] = ties.view(-1)[: len(flat) // 4]
    if len(flat) > 256:
        flat[32:64] = 0.0
        flat[len(flat) // 3], flat[len(flat) // 2] = float("nan"), float("-inf")
    return x.to(dtype)


def assert_same_bits(x: torch.Tensor, options: OperandOptions, *, out_dtype: torch.dtype | None = None) -> None:
    arguments = {
        "key": KEY if options.rounding == "sr" else None,
        "transform": None if options.hadamard == "none" else make_hadamard(options.hadamard, seed=3, step=4),
        "row_offset": 7 if options.rounding == "sr" else 0,
        "out_dtype": out_dtype,
    }
    want, want_count = formats.qdq(x, options, **arguments)
    got, count = compiled.qdq(x, options, **arguments)
    assert got.dtype == want.dtype
    integers = torch.int32 if got.dtype == torch.float32 else torch.int16
    same = (got.view(integers) == want.view(integers)) | (got.isnan() & want.isnan())
    assert same.all(), (options, x.shape, int((~same).sum()))
    assert count == want_count


@pytest.fixture(scope="module", autouse=True)
def _needs_compiler() -> None:
    assert load().library is not None, load().reason


def products() -> list[tuple[object, ...]]:
    return list(itertools.product(KINDS, SCALE_MODES, ("rtn", "sr"), ("none", "static"), (-1, -2), DTYPES))


def check_product(cases: list[tuple[object, ...]], shapes: list[tuple[int, ...]]) -> None:
    for (block, hadamard), mode, rounding, clip, axis, dtype in cases:  # type: ignore[misc]
        options = OperandOptions(
            block=block, hadamard=hadamard, scale_mode=mode, rounding=rounding, clip=clip, axis=axis
        )
        for shape, out_dtype in itertools.product(shapes, (None, *DTYPES)):
            assert_same_bits(hard_values(shape, dtype), options, out_dtype=out_dtype)


@pytest.mark.parametrize("part", range(4))
def test_equal_to_the_reference_over_the_options(part: int) -> None:
    cases = products()
    check_product(cases[part::16], [(32, 96)])


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))
def test_equal_to_the_reference_over_all_options_and_shapes(part: int) -> None:
    check_product(products()[part::8], [(32, 32), (96, 320), (3, 64, 32), (2, 2, 32, 64), (64, 1056)])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_equal_to_the_reference_on_any_shape(data: st.DataObject) -> None:
    block, hadamard = data.draw(st.sampled_from(KINDS))
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    axis = data.draw(st.integers(-len(shape), -1)) if block == "1d" else -1
    if block == "2d":
        shape = [*shape[:-2], 32 * shape[0], 32 * shape[-1]]
    else:
        shape[axis] *= 32
    options = OperandOptions(
        block=block, hadamard=hadamard, axis=axis, scale_mode=data.draw(st.sampled_from(SCALE_MODES)),
        rounding=data.draw(st.sampled_from(("rtn", "sr"))), clip=data.draw(st.sampled_from(("none", "static"))),
    )  # fmt: skip
    x = hard_values(tuple(shape), data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 99)))
    assert_same_bits(x, options)


def test_large_tensors_are_cut_between_threads_without_a_trace() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for axis, rounding in itertools.product((-1, -2), ("rtn", "sr")):
                options = OperandOptions(axis=axis, rounding=rounding)
                assert_same_bits(hard_values((1056, 2080), torch.float32), options)
    finally:
        torch.set_num_threads(threads)


def test_views_empty_tensors_and_gradients() -> None:
    base = torch.randn(64, 128)
    for view in (base.t(), base[:, ::2], base[0].expand(32, 128), torch.randn(64, 64, requires_grad=True)):
        assert_same_bits(view, OperandOptions())
    empty, count = qdq(torch.empty(0, 64), OperandOptions())
    assert empty.shape == (0, 64)
    assert count == 0


@pytest.mark.parametrize(
    ("x", "options", "error", "text"),
    [
        (torch.zeros(4, 40), {}, ValueError, "not a multiple of 32"),
        (torch.zeros(4, 64, dtype=torch.float16), {}, TypeError, "cannot quantise torch.float16"),
        (torch.zeros(4, 64, dtype=torch.float64), {}, TypeError, "cannot quantise torch.float64"),
        (torch.zeros(4, 64), {"rounding": "sr"}, ValueError, "needs a key"),
    ],
)
def test_bad_input_is_refused_as_by_the_reference(
    x: torch.Tensor, options: dict[str, str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        qdq(x, OperandOptions(**options))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"LPTCTL_NO_COMPILE": "1"}, "LPTCTL_NO_COMPILE is set"),
        ({"PATH": "/nonexistent"}, "no C compiler"),
        ({"CC": "{folder}/cc"}, "cannot compile mxfp4.c (no such option)"),
        ({"XDG_CACHE_HOME": "/proc"}, "cannot be loaded"),
    ],
)
def test_without_a_compiler_the_reference_runs_and_says_why(
    change: dict[str, str], reason: str, tmp_path: Path
) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo broken\necho "no such option" >&2\nexit 1\n')
    broken.chmod(0o755)
    code = (
        "import torch; from engine import formats; from engine.kernels.cpu import describe_path, qdq; "
        "x = torch.randn(32, 64); o = formats.OperandOptions(); "
        "assert torch.equal(qdq(x, o)[0], formats.qdq(x, o)[0]); print(describe_path())"
    )
    env = {**engine_env(), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env |= {key: value.format(folder=tmp_path) for key, value in change.items()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout


def test_two_processes_compile_into_one_cache(tmp_path: Path) -> None:
    code = "from engine.kernels.cpu import describe_path; print(describe_path())"
    env = {**engine_env(), "XDG_CACHE_HOME": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=120)[0] for process in started}
    assert len(said) == 1
    assert "compiled by" in said.pop()
    assert [p.suffix for p in (tmp_path / "lptctl").iterdir()] == [".so"]
