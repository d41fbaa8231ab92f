"""Which implementation runs and why; bad calls; the paths without kernels."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import tests.helpers.triton_interpreter  # noqa: F401  (first: it decides how kernels run)
from engine import formats, kernels
from engine.formats import MXFP4Tensor, OperandOptions, combine_keys, make_hadamard, mxfp8, operand_key, step_key
from engine.formats.mxfp8 import MXFP8Options
from engine.kernels import DeviceHadamard, combine_key_tensors, kernel_path
from engine.kernels import mxfp8 as kernels_mxfp8
from engine.kernels.hadamard import key_number, key_tensor
from tests.helpers.quantise import KEY, assert_equals_reference, assert_two_equal_reference, same_bits, sample

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture(params=["auto", "reference", "triton"])
def choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LPTCTL_KERNELS", request.param)
    return request.param


def test_cpu_tensors_take_no_triton_kernel_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LPTCTL_KERNELS", raising=False)
    found = kernel_path("cpu")
    assert found.path in ("compiled", "reference")
    assert not found.uses_kernels
    assert found.why


def test_the_reference_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTCTL_KERNELS", "reference")
    found = kernel_path("cpu")
    assert (found.path, found.why) == ("reference", "LPTCTL_KERNELS=reference asks for it.")


def test_the_interpreter_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTCTL_KERNELS", "triton")
    found = kernel_path("cpu")
    assert found.path == "interpreter"
    assert "interpreter runs the kernels, and 12 small cases equal the reference bit for bit" in found.why


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTCTL_KERNELS", "cuda")
    with pytest.raises(ValueError, match="LPTCTL_KERNELS='cuda' is not one of auto, reference, triton"):
        kernel_path("cpu")


def test_a_device_without_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LPTCTL_KERNELS", "auto")
    found = kernel_path("meta")
    assert found.path == "reference"
    assert found.why == "the kernels are for CUDA and ROCm devices, not meta."
    monkeypatch.setenv("LPTCTL_KERNELS", "triton")
    with pytest.raises(
        RuntimeError, match=r"LPTCTL_KERNELS=triton, but no kernel can run on meta: the kernels are for"
    ):
        kernel_path("meta")


def in_new_python(code: str, **environment: str) -> Any:
    """Run code that prints JSON, with Triton not interpreting unless told."""
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "LPTCTL_KERNELS")}
    result = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(result.stdout.splitlines()[-1])


DESCRIBE = """
import dataclasses, json
from engine.kernels.probe import _probe
import torch
print(json.dumps(dataclasses.asdict(_probe(torch.device("cpu"), "triton"))))
"""


def test_triton_without_its_interpreter_has_no_cpu() -> None:
    found = in_new_python(DESCRIBE)
    assert found["path"] == "reference"
    assert "Triton has no CPU back end; set TRITON_INTERPRET=1" in found["why"]


def test_without_triton_the_reference_runs_and_the_reason_is_given() -> None:
    found = in_new_python("import sys; sys.modules['triton'] = None\n" + DESCRIBE)
    assert found["path"] == "reference"
    assert "Triton is not installed" in found["why"]
    assert "install the triton that your torch names" in found["why"]


def test_a_triton_that_cannot_compile_leaves_the_reference_with_the_reason() -> None:
    """Compiled kernels on CPU tensors: no driver, so every launch fails as on a GPU that Triton does not support."""
    found = in_new_python("import triton, engine.kernels.launch\ntriton.knobs.runtime.interpret = True\n" + DESCRIBE)
    assert found["path"] == "reference"
    assert "cannot compile or run the kernels: " in found["why"]


def test_wrong_bits_leave_the_reference_with_the_cases() -> None:
    """NumPy with subnormal numbers flushed to zero, as a compiler option can make a GPU compute."""
    found = in_new_python(
        "import tests.helpers.triton_interpreter, warnings, numpy\n"
        "from triton.runtime import interpreter\n"
        "warnings.simplefilter('ignore')\n"
        "binary_op = interpreter.InterpreterBuilder.binary_op\n"
        "def flushing(self, lhs, rhs, op):\n"
        "    result = binary_op(self, lhs, rhs, op)\n"
        "    if result.data.dtype == numpy.float32:\n"
        "        result.data[abs(result.data) < 2.0**-126] = 0\n"
        "    return result\n"
        "interpreter.InterpreterBuilder.binary_op = flushing\n" + DESCRIBE
    )
    assert found["path"] == "reference"
    assert "interpreter gives other bits than the reference in " in found["why"]
    assert "columns" in found["why"]


@pytest.mark.parametrize("transform", ["none", "random"])
def test_every_choice_gives_the_same_bits(choice: str, transform: Any) -> None:
    x = sample((64, 96), torch.bfloat16)
    x[3, 3] = float("nan")
    options = OperandOptions(axis=-2, rounding="sr", hadamard=transform)
    assert_equals_reference(x, options, row_offset=2)
    assert_two_equal_reference(x, OperandOptions(rounding="sr"), options)
    chosen = MXFP8Options(axis=-2)
    assert same_bits(kernels_mxfp8.qdq(x, chosen)[0], mxfp8.qdq(x, chosen)[0])


def test_keys_transforms_and_counters_may_be_tensors(choice: str) -> None:
    x = sample((64, 64), torch.float32)
    x[0, 0] = float("inf")
    options = OperandOptions(rounding="sr", hadamard="3rht")
    transform = make_hadamard("3rht", seed=5, step=6)
    expected, count = formats.qdq(x, options, key=KEY, transform=transform)
    counter = torch.tensor(7)
    on_device = DeviceHadamard.from_transform(transform, "cpu")
    key = key_tensor(KEY, x.device)
    values, returned = kernels.qdq(x, options, key=key, transform=on_device, counter=counter)
    assert same_bits(values, expected)
    assert returned is counter
    assert counter.item() == 7 + count.item()
    packed = kernels.quantise(x, options, key=key, transform=on_device)
    assert torch.equal(packed.codes, formats.quantise(x, options, key=KEY, transform=transform).codes)


@pytest.mark.parametrize("shape", [(0, 64), (32, 0), (0, 0)])
def test_empty_tensors(shape: tuple[int, int], choice: str) -> None:
    x = torch.zeros(shape)
    for options in (OperandOptions(), OperandOptions(axis=-2), OperandOptions(block="2d")):
        values, count = kernels.qdq(x, options)
        assert values.shape == shape
        assert count.item() == 0
        q = kernels.quantise(x, options)
        assert kernels.dequantise(q, torch.bfloat16).shape == shape
    by_rows, by_columns, count = kernels.qdq_two(x, OperandOptions(), OperandOptions(axis=-2))
    assert by_rows.shape == by_columns.shape == shape
    assert count.item() == 0
    for one in kernels.quantise_two(x, OperandOptions(), OperandOptions(axis=-2)):
        assert one.shape == shape
    assert kernels_mxfp8.qdq_two(x, MXFP8Options(), MXFP8Options(axis=-2))[0].shape == shape
    assert kernels_mxfp8.dequantise(kernels_mxfp8.quantise(x, MXFP8Options()), torch.float32).shape == shape


def test_results_carry_no_gradient(choice: str) -> None:
    x = sample((32, 32), torch.float32).requires_grad_()
    assert not kernels.qdq(x, OperandOptions())[0].requires_grad
    assert not kernels.qdq_two(x, OperandOptions(), OperandOptions(axis=-2))[1].requires_grad
    assert not kernels_mxfp8.qdq(x, MXFP8Options())[0].requires_grad


BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (torch.zeros(32, dtype=torch.float16), {}, TypeError, r"cannot quantise torch\.float16: convert the tensor to"),
    (torch.zeros(32, dtype=torch.float64), {}, TypeError, r"cannot quantise torch\.float64: convert the tensor to"),
    (torch.zeros(32, dtype=torch.int32), {}, TypeError, r"cannot quantise torch\.int32"),
    (torch.zeros(4, 40), {}, ValueError, r"axis 1 of shape \(4, 40\) has 40 values, not a multiple of 32"),
    (
        torch.zeros(2880, 40),
        {"options": OperandOptions(block="2d")},
        ValueError,
        r"has 40 values, not a multiple of 32",
    ),
    (torch.zeros(4, 64), {"options": OperandOptions(axis=-2)}, ValueError, r"axis 0 of shape \(4, 64\) has 4 values"),
    (torch.tensor(1.0), {}, ValueError, r"axis -1 is out of range .* shape \(\)"),
    (torch.zeros(32), {"options": OperandOptions(rounding="sr")}, ValueError, "rounding 'sr' needs a key; pass key="),
    (torch.zeros(32), {"key": 5}, ValueError, "a key was given, but rounding 'rtn' draws no noise"),
    (torch.zeros(32), {"key": torch.tensor([5])}, ValueError, "a key was given, but rounding 'rtn' draws no noise"),
    (torch.zeros(32), {"row_offset": -2}, ValueError, "row_offset -2 is negative"),
    (
        torch.zeros(32),
        {"options": OperandOptions(rounding="sr"), "key": 1 << 64},
        ValueError,
        r"key 18446744073709551616 is not in 0\.\.2\^64 - 1",
    ),
    (
        torch.zeros(32),
        {"options": OperandOptions(rounding="sr"), "key": torch.tensor([1, 2])},
        ValueError,
        r"a key tensor holds one int64; got torch\.int64 of shape \(2,\)",
    ),
    (
        torch.zeros(32),
        {"options": OperandOptions(rounding="sr"), "key": torch.tensor([1.0])},
        ValueError,
        r"a key tensor holds one int64; got torch\.float32 of shape \(1,\)",
    ),
    (
        torch.zeros(32),
        {"options": OperandOptions(hadamard="random")},
        ValueError,
        "hadamard 'random' was asked for, but the transform given is 'none'",
    ),
    (
        torch.zeros(32),
        {"transform": DeviceHadamard.from_transform(make_hadamard("fixed", seed=0, step=0), "cpu")},
        ValueError,
        "but the transform given is 'fixed'",
    ),
    (
        torch.zeros(32),
        {
            "options": OperandOptions(rounding="sr"),
            "key": torch.zeros(1, dtype=torch.int64, device="meta"),
        },
        ValueError,
        "x is on cpu but the key on meta; move it to x's device",
    ),
]


@pytest.mark.parametrize(("x", "arguments", "error", "message"), BAD)
def test_a_bad_call_says_what_is_wrong(
    x: torch.Tensor, arguments: dict[str, Any], error: type[Exception], message: str, choice: str
) -> None:
    kwargs = {"options": OperandOptions(), **arguments}
    with pytest.raises(error, match=message):
        kernels.qdq(x, **kwargs)
    with pytest.raises(error, match=message):
        kernels.quantise(x, **kwargs)


@pytest.mark.parametrize(
    ("counter", "message"),
    [
        (torch.tensor(1.0), r"got torch\.float32 of shape \(\) on cpu"),
        (torch.zeros(1, dtype=torch.int64), r"got torch\.int64 of shape \(1,\) on cpu"),
        (torch.zeros((), dtype=torch.int64, device="meta"), r"got torch\.int64 of shape \(\) on meta"),
    ],
)
def test_a_counter_must_fit(counter: torch.Tensor, message: str, choice: str) -> None:
    with pytest.raises(ValueError, match=r"must be a 0-dim int64 tensor on cpu; " + message):
        kernels.qdq(torch.zeros(32), OperandOptions(), counter=counter)
    with pytest.raises(ValueError, match=message):
        kernels.qdq_two(torch.zeros(32, 32), OperandOptions(), OperandOptions(axis=-2), counter=counter)


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "message"),
    [
        ((64,), {}, {"axis": -2}, r"two orientations need a matrix; got shape \(64,\)"),
        ((64, 64), {"axis": 0}, {"axis": -2}, "needs axis -1 and the column-wise one axis -2; got 0 and -2"),
        ((64, 64), {}, {"axis": 5}, "needs axis -1 and the column-wise one axis -2; got -1 and 5"),
        ((64, 40), {}, {"axis": -2}, "has 40 values, not a multiple of 32"),
        ((40, 64), {}, {"axis": -2}, "has 40 values, not a multiple of 32"),
    ],
)
def test_two_orientations_of_a_bad_matrix(
    shape: tuple[int, ...], rows: dict[str, Any], columns: dict[str, Any], message: str, choice: str
) -> None:
    for call in (kernels.qdq_two, kernels.quantise_two):
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(shape), OperandOptions(**rows), OperandOptions(**columns))


def test_mxfp8_in_two_orientations_of_a_bad_matrix() -> None:
    for rows, columns in (
        (MXFP8Options(axis=0), MXFP8Options(axis=-2)),
        (MXFP8Options(element="e5m2"), MXFP8Options(axis=-2)),
    ):
        with pytest.raises(ValueError, match="two orientations need a matrix, axes -1 and -2 and one element format"):
            kernels_mxfp8.qdq_two(torch.zeros(32, 32), rows, columns)
    with pytest.raises(TypeError, match=r"cannot quantise torch\.float16"):
        kernels_mxfp8.qdq(torch.zeros(32, dtype=torch.float16), MXFP8Options())


def test_parts_of_a_packed_tensor_on_two_devices() -> None:
    q = kernels.quantise(torch.zeros(32), OperandOptions())
    moved = MXFP4Tensor(
        codes=q.codes, scales=q.scales.to("meta"), axis=q.axis, block=q.block, shape=q.shape, clip=q.clip
    )
    with pytest.raises(ValueError, match="codes are on cpu but scales on meta; put both on one device"):
        kernels.dequantise(moved, torch.float32)
    with pytest.raises(TypeError, match=r"cannot dequantise to torch\.float16"):
        kernels.dequantise(q, torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "2rht"}, "unknown Hadamard kind '2rht'; expected one of random, fixed, 3rht"),
        ({"kind": "3rht"}, r"permutation of a '3rht' transform must be contiguous torch\.int32 of shape \(3, 32\)"),
        ({"permutation": torch.zeros(1, 32)}, r"got torch\.float32 of shape \(1, 32\)"),
        ({"signs": torch.zeros(1, 32, dtype=torch.int32)}, r"signs of a 'random' transform .* got torch\.int32"),
        ({"signs": torch.zeros(1, 32, device="meta")}, "permutation is on cpu and signs on meta"),
    ],
)
def test_a_bad_device_transform(change: dict[str, Any], message: str) -> None:
    good = {"kind": "random", "permutation": torch.zeros(1, 32, dtype=torch.int32), "signs": torch.zeros(1, 32)}
    with pytest.raises(ValueError, match=message):
        DeviceHadamard(**(good | change))


def test_a_device_transform_takes_over_one_of_its_kind_only() -> None:
    on_device = DeviceHadamard.from_transform(make_hadamard("random", seed=1, step=1), "cpu")
    other = make_hadamard("random", seed=2, step=1)
    on_device.copy_(other)
    assert on_device.to_transform() == other
    with pytest.raises(ValueError, match="cannot put a 'fixed' transform in place of a 'random' one"):
        on_device.copy_(make_hadamard("fixed", seed=2, step=1))


def test_keys_are_combined_in_tensors_as_in_numbers() -> None:
    steps = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, step_key(1, 2, 3)]
    operands = [0, 1, 1 << 63, (1 << 64) - 1, *(operand_key(f"layers.{i}.wq", "dgrad_dy") for i in range(30))]
    on_device = torch.cat([key_tensor(key, torch.device("cpu")) for key in operands])
    for step in steps:
        combined = combine_key_tensors(key_tensor(step, torch.device("cpu")), on_device)
        assert [key_number(key) for key in combined] == [combine_keys(step, key) for key in operands]
    assert all(key_number(key_tensor(key, torch.device("cpu"))) == key for key in itertools.chain(steps, operands))
