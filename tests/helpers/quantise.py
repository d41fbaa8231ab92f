"""Comparing the quantise kernels with the reference, bit for bit, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine import formats, kernels
from engine.formats import OperandOptions, make_hadamard
from engine.formats import mxfp8 as reference_mxfp8
from engine.formats.mxfp8 import MXFP8Options
from engine.kernels import mxfp8

KEY = 0xFEDCBA9876543210


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bit for bit, any NaN equal to any NaN."""
    nan = a.isnan()
    words = torch.int32 if a.dtype is torch.float32 else torch.int16
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(nan, b.isnan())
        and torch.equal(a.view(words)[~nan], b.view(words)[~nan])
    )


def noise_and_transform(options: OperandOptions, *, seed: int = 1) -> dict[str, Any]:
    """Return the key and the transform that the options call for."""
    kind = options.hadamard
    return {
        "key": KEY + seed if options.rounding == "sr" else None,
        "transform": make_hadamard(kind, seed=seed, step=2) if kind != "none" else None,
    }


def sample(shape: tuple[int, ...], dtype: torch.dtype, *, exponent: int = 0, seed: int = 0) -> Tensor:
    """Return normal values times 2^exponent with zeros, negative zeros and exact ties among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    kind = torch.randint(0, 16, shape, generator=g)
    x[kind == 0] = 0.0
    x[kind == 1] = -0.0
    x[kind == 2] = (x[kind == 2] * 8).round() / 8
    return (x * 2.0**exponent).to(torch.float32).to(dtype)


def assert_equals_reference(
    x: Tensor, options: OperandOptions, *, out_dtype: torch.dtype | None = None, row_offset: int = 0, seed: int = 1
) -> None:
    """Check qdq, quantise and dequantise of x (on its device) against the reference on the CPU."""
    arguments = noise_and_transform(options, seed=seed) | {"row_offset": row_offset}
    on_cpu = x.cpu()
    expected, count = formats.qdq(on_cpu, options, out_dtype=out_dtype, **arguments)
    values, counted = kernels.qdq(x, options, out_dtype=out_dtype, **arguments)
    assert values.device == x.device
    assert values.is_contiguous()
    assert same_bits(values.cpu(), expected)
    assert counted.dtype == torch.int64
    assert counted.shape == ()
    assert counted.item() == count.item()
    reference = formats.quantise(on_cpu, options, **arguments)
    packed = kernels.quantise(x, options, **arguments)
    assert (packed.axis, packed.block, packed.shape, packed.clip) == (
        reference.axis,
        reference.block,
        reference.shape,
        reference.clip,
    )
    assert torch.equal(packed.scales.cpu(), reference.scales)
    assert torch.equal(packed.codes.cpu(), reference.codes)
    dtype = out_dtype or x.dtype
    assert same_bits(kernels.dequantise(packed, dtype).cpu(), expected)


def assert_two_equal_reference(
    x: Tensor,
    rows: OperandOptions,
    columns: OperandOptions,
    *,
    out_dtype: torch.dtype | None = None,
    row_offset: int = 0,
) -> None:
    """Check qdq_two and quantise_two of a matrix against two calls of the reference."""
    by_rows, by_columns = noise_and_transform(rows, seed=1), noise_and_transform(columns, seed=2)
    arguments = {f"rows_{name}": value for name, value in by_rows.items()}
    arguments |= {f"columns_{name}": value for name, value in by_columns.items()}
    on_cpu = x.cpu()
    expected = [
        formats.qdq(on_cpu, options, out_dtype=out_dtype, row_offset=row_offset, **own)
        for options, own in ((rows, by_rows), (columns, by_columns))
    ]
    *values, counted = kernels.qdq_two(x, rows, columns, out_dtype=out_dtype, row_offset=row_offset, **arguments)
    for got, (wanted, _) in zip(values, expected, strict=True):
        assert same_bits(got.cpu(), wanted)
    assert counted.item() == sum(count.item() for _, count in expected)
    packed = kernels.quantise_two(x, rows, columns, row_offset=row_offset, **arguments)
    for got, options, own in zip(packed, (rows, columns), (by_rows, by_columns), strict=True):
        reference = formats.quantise(on_cpu, options, row_offset=row_offset, **own)
        assert torch.equal(got.codes.cpu(), reference.codes)
        assert torch.equal(got.scales.cpu(), reference.scales)


def assert_mxfp8_equals_reference(x: Tensor, options: MXFP8Options, *, out_dtype: torch.dtype | None = None) -> None:
    """Check MXFP8 qdq, quantise and dequantise of x (on its device) against the reference on the CPU."""
    on_cpu = x.cpu()
    expected, count = reference_mxfp8.qdq(on_cpu, options, out_dtype=out_dtype)
    values, counted = mxfp8.qdq(x, options, out_dtype=out_dtype)
    assert same_bits(values.cpu(), expected)
    assert counted.item() == count.item()
    reference = reference_mxfp8.quantise(on_cpu, options)
    q = mxfp8.quantise(x, options)
    assert (q.axis, q.block, q.elements.dtype) == (reference.axis, reference.block, reference.elements.dtype)
    assert torch.equal(q.scales.cpu(), reference.scales)
    assert torch.equal(q.elements.cpu().view(torch.uint8), reference.elements.view(torch.uint8))
    assert same_bits(mxfp8.dequantise(q, out_dtype or x.dtype).cpu(), expected)


def assert_mxfp8_two_equal_reference(x: Tensor, rows: MXFP8Options, columns: MXFP8Options) -> None:
    """Check MXFP8 qdq_two of a matrix against two calls of the reference."""
    *values, counted = mxfp8.qdq_two(x, rows, columns)
    expected = [reference_mxfp8.qdq(x.cpu(), options) for options in (rows, columns)]
    for got, (wanted, _) in zip(values, expected, strict=True):
        assert same_bits(got.cpu(), wanted)
    assert counted.item() == sum(count.item() for _, count in expected)
