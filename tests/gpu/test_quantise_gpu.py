"""The quantise kernels on a real GPU equal the reference on the CPU: ``python -m pytest tests/gpu -m gpu``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine import formats, kernels
from engine.formats import SCALE_MODES, OperandOptions, combine_keys, make_hadamard, mxfp8, operand_key, step_key
from engine.formats.mxfp8 import MXFP8Options
from engine.kernels import DeviceHadamard, combine_key_tensors, kernel_path, launch
from engine.kernels.hadamard import key_number, key_tensor
from tests.helpers.quantise import (
    KEY,
    assert_equals_reference,
    assert_mxfp8_equals_reference,
    assert_mxfp8_two_equal_reference,
    assert_two_equal_reference,
    noise_and_transform,
    same_bits,
    sample,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device"),
    pytest.mark.skipif(
        launch.INTERPRETED.value, reason="kernels run in Triton's interpreter here; run tests/gpu on its own"
    ),
]
GPU = torch.device("cuda", 0)
DTYPES = (torch.float32, torch.bfloat16)
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rows": ((30, 9, 288), {"axis": -1}),
    "columns": ((160, 424), {"axis": -2}),
    "columns of odd length": ((3, 64, 77), {"axis": 1}),
    "first axis": ((64, 5, 31), {"axis": 0}),
    "tiles": ((96, 2880), {"block": "2d"}),
    "tiles packed down": ((3, 64, 160), {"block": "2d", "axis": -2}),
}


@pytest.fixture(autouse=True)
def _kernels_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTCTL_KERNELS", "triton")


def test_the_probe_runs_the_kernels_here() -> None:
    found = kernel_path(GPU)
    assert found.path == "triton", found.why
    assert torch.cuda.get_device_name(GPU) in found.device


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rounding", ["rtn", "sr"])
@pytest.mark.parametrize("mode", SCALE_MODES)
def test_every_combination_of_options(mode: Any, rounding: Any, layout: str) -> None:
    shape, where = LAYOUTS[layout]
    transforms = ("none",) if where.get("block") == "2d" else ("none", "random", "fixed", "3rht")
    for hadamard, clip, dtype, out_dtype in itertools.product(transforms, ("none", "static"), DTYPES, DTYPES):
        options = OperandOptions(scale_mode=mode, rounding=rounding, hadamard=hadamard, clip=clip, **where)
        x = sample(shape, dtype)
        x.view(-1)[7] = float("nan")
        x.view(-1)[-5] = float("-inf")
        assert_equals_reference(x.to(GPU), options, out_dtype=out_dtype, row_offset=3)


@pytest.mark.parametrize("exponent", [-149, -140, -126, -120, 60, 120, 126])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ends_of_the_range(layout: str, exponent: int) -> None:
    """Subnormal numbers among them: no flush to zero."""
    shape, where = LAYOUTS[layout]
    for dtype, rounding, mode in itertools.product(DTYPES, ("rtn", "sr"), ("floor", "ceil")):
        options = OperandOptions(rounding=rounding, scale_mode=mode, **where)
        assert_equals_reference(sample(shape, dtype, exponent=exponent).to(GPU), options)


def test_ten_million_values() -> None:
    for dtype, options in itertools.product(
        DTYPES,
        (
            OperandOptions(),
            OperandOptions(rounding="sr"),
            OperandOptions(axis=-2, rounding="sr", hadamard="random"),
            OperandOptions(block="2d"),
        ),
    ):
        assert_equals_reference(sample((2048, 5120), dtype).to(GPU), options)


TWO = [
    (OperandOptions(), OperandOptions(axis=-2)),
    (OperandOptions(rounding="sr"), OperandOptions(axis=-2, rounding="sr", hadamard="random")),
    (OperandOptions(scale_mode="uos6", clip="static"), OperandOptions(axis=-2, hadamard="3rht", clip="static")),
    (OperandOptions(hadamard="random"), OperandOptions(axis=-2, rounding="sr")),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), TWO)
def test_two_orientations(rows: OperandOptions, columns: OperandOptions, dtype: torch.dtype) -> None:
    x = sample((320, 2880), dtype)
    x[40, 3], x[2, 200] = float("nan"), float("inf")
    assert_two_equal_reference(x.to(GPU), rows, columns, row_offset=7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", mxfp8.SCALE_MODES)
@pytest.mark.parametrize("element", mxfp8.ELEMENTS)
def test_mxfp8(element: Any, mode: Any, layout: str) -> None:
    shape, where = LAYOUTS[layout]
    options = MXFP8Options(element=element, scale_mode=mode, **where)
    for dtype, out_dtype, exponent in itertools.product(DTYPES, DTYPES, (-149, -126, 0, 126)):
        x = sample(shape, dtype, exponent=exponent)
        x.view(-1)[7] = float("nan")
        assert_mxfp8_equals_reference(x.to(GPU), options, out_dtype=out_dtype)


@pytest.mark.parametrize("element", mxfp8.ELEMENTS)
def test_mxfp8_in_two_orientations(element: Any) -> None:
    rows, columns = MXFP8Options(element=element), MXFP8Options(element=element, axis=-2)
    assert_mxfp8_two_equal_reference(sample((320, 2880), torch.bfloat16).to(GPU), rows, columns)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_tiles_change_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for num_warps in (1, 2, 4):
        tiles = dict.fromkeys(launch.TILES, launch.Tile(size=size, num_warps=num_warps))
        monkeypatch.setattr(launch, "TILES", tiles)
        for options in (OperandOptions(rounding="sr"), OperandOptions(axis=-2, rounding="sr", hadamard="random")):
            assert_equals_reference(sample((96, 416), torch.bfloat16).to(GPU), options)


@pytest.mark.parametrize("axis", [-1, -2])
def test_more_than_2_31_values(axis: int) -> None:
    """The last rows of a tensor of 2^31 + 2^26 values, against the reference of those rows."""
    rows, columns, tail = (1 << 15) + 1024, 1 << 16, 64
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=GPU)
    x[-tail:] = sample((tail, columns), torch.bfloat16).to(GPU)
    options = OperandOptions(axis=axis, rounding="sr")
    values, _ = kernels.qdq(x, options, key=KEY)
    expected, _ = formats.qdq(x[-tail:].cpu(), options, key=KEY, row_offset=rows - tail)
    assert same_bits(values[-tail:].cpu(), expected)
    assert values[: rows - tail].count_nonzero().item() == 0
    packed = kernels.quantise(x, options, key=KEY)
    assert same_bits(kernels.dequantise(packed, torch.bfloat16)[-tail:].cpu(), expected)


def test_rows_so_long_that_32_exceed_31_bits() -> None:
    columns = (1 << 26) + 32
    x = torch.zeros(32, columns, dtype=torch.bfloat16, device=GPU)
    x[:, -64:] = sample((32, 64), torch.bfloat16).to(GPU)
    for block in ("1d", "2d"):
        options = OperandOptions(axis=-2, block=block)
        values, _ = kernels.qdq(x, options)
        expected, _ = formats.qdq(x[:, -64:].cpu(), options)
        assert same_bits(values[:, -64:].cpu(), expected)


def test_nothing_waits_for_the_device_and_a_graph_takes_new_keys_and_transforms() -> None:
    x = sample((256, 512), torch.bfloat16).to(GPU)
    rows, columns = OperandOptions(rounding="sr"), OperandOptions(axis=-2, rounding="sr", hadamard="random")
    key = key_tensor(1, GPU)
    transform = DeviceHadamard.from_transform(make_hadamard("random", seed=0, step=0), GPU)
    counter = torch.zeros((), dtype=torch.int64, device=GPU)

    def step() -> tuple[torch.Tensor, ...]:
        by_rows, by_columns, _ = kernels.qdq_two(
            x, rows, columns, rows_key=key, columns_key=key, columns_transform=transform, counter=counter
        )
        alone, _ = kernels.qdq(x, columns, key=key, transform=transform, counter=counter)
        return by_rows, by_columns, alone, kernels.dequantise(kernels.quantise(x, rows, key=key), torch.bfloat16)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in (5, 6):
        key.copy_(key_tensor(KEY + seed, torch.device("cpu")))
        transform.copy_(make_hadamard("random", seed=seed, step=2))
        graph.replay()
        on_cpu = x.cpu()
        by_rows, _ = formats.qdq(on_cpu, rows, key=KEY + seed)
        by_columns, _ = formats.qdq(on_cpu, columns, **noise_and_transform(columns, seed=seed))
        for got, expected in zip(results, (by_rows, by_columns, by_columns, by_rows), strict=True):
            assert same_bits(got.cpu(), expected)
    assert counter.item() == 0


def test_keys_are_combined_on_the_device() -> None:
    step = step_key(1, 2, 3)
    operands = [operand_key(f"layers.{i}", "dgrad_dy") for i in range(20)]
    on_gpu = torch.cat([key_tensor(key, GPU) for key in operands])
    combined = combine_key_tensors(key_tensor(step, GPU), on_gpu)
    assert [key_number(key) for key in combined] == [combine_keys(step, key) for key in operands]


def test_mixed_devices_are_refused() -> None:
    x = torch.zeros(32, 32, device=GPU)
    with pytest.raises(ValueError, match=r"x is on cuda:0 but the key on cpu"):
        kernels.qdq(x, OperandOptions(rounding="sr"), key=torch.tensor([1]))
    transform = DeviceHadamard.from_transform(make_hadamard("fixed", seed=0, step=0), "cpu")
    with pytest.raises(ValueError, match=r"x is on cuda:0 but the transform on cpu"):
        kernels.qdq(x, OperandOptions(hadamard="fixed"), transform=transform)
    with pytest.raises(ValueError, match=r"0-dim int64 tensor on cuda:0; got torch.int64 of shape \(\) on cpu"):
        kernels.qdq(x, OperandOptions(), counter=torch.tensor(0))
