"""The functions of ``engine.formats.mxfp8`` for any device: MXFP4's kernels with other constants, or the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.formats import mxfp8
from engine.formats.mxfp4 import check_output, layout_of
from engine.formats.mxfp8 import MXFP8Options, MXFP8Tensor
from engine.formats.options import OperandOptions
from engine.kernels.operand import Operand
from engine.kernels.probe import kernel_path


def qdq(x: Tensor, options: MXFP8Options, *, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Quantise and dequantise; arguments, results, errors and bits as :func:`engine.formats.mxfp8.qdq`."""
    mxfp8.check_input(x)
    dtype = out_dtype or x.dtype
    check_output(dtype)
    layout_of(x.shape, options.layout)
    if x.numel() == 0 or not kernel_path(x.device).uses_kernels:
        return mxfp8.qdq(x, options, out_dtype=out_dtype)
    from engine.kernels import launch

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    launch.quantise(x.detach().contiguous(), Operand.of_fp8(options, x.ndim), launch.NO_DRAW, out, None, count).run()
    return out, count


def quantise(x: Tensor, options: MXFP8Options) -> MXFP8Tensor:
    """Quantise; arguments, results, errors and bits as :func:`engine.formats.mxfp8.quantise`."""
    mxfp8.check_input(x)
    layout = layout_of(x.shape, options.layout)
    if x.numel() == 0 or not kernel_path(x.device).uses_kernels:
        return mxfp8.quantise(x, options)
    from engine.kernels import launch

    elements = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(layout.scales, dtype=torch.uint8, device=x.device)
    operand = Operand.of_fp8(options, x.ndim)
    launch.quantise(x.detach().contiguous(), operand, launch.NO_DRAW, elements, scales, None).run()
    return MXFP8Tensor(
        elements=elements.view(mxfp8.DTYPES[options.element]), scales=scales, axis=layout.axis, block=options.block
    )


def dequantise(q: MXFP8Tensor, dtype: torch.dtype) -> Tensor:
    """Return a quantised tensor's values; result and errors as :func:`engine.formats.mxfp8.dequantise`.

    Raises:
        ValueError: if elements and scales are on different devices.
    """
    if q.elements.device != q.scales.device:
        raise ValueError(f"elements are on {q.elements.device} but scales on {q.scales.device}; put both on one device")
    check_output(dtype)
    shape = q.elements.shape
    layout_of(shape, OperandOptions(block=q.block, axis=q.axis))
    if q.elements.numel() == 0 or not kernel_path(q.elements.device).uses_kernels:
        return mxfp8.dequantise(q, dtype)
    from engine.kernels import launch

    name = next(name for name, kind in mxfp8.DTYPES.items() if kind == q.elements.dtype)
    operand = Operand.of_fp8(MXFP8Options(element=name, block=q.block, axis=q.axis), len(shape))
    out = torch.empty(shape, dtype=dtype, device=q.elements.device)
    launch.dequantise(q.elements.contiguous().view(torch.uint8), q.scales.contiguous(), shape, operand, out).run()
    return out


def _check_two(x: Tensor, rows: MXFP8Options, columns: MXFP8Options) -> None:
    axes = tuple(o.axis % 2 if -2 <= o.axis < 2 else None for o in (rows, columns))
    if x.ndim != 2 or axes != (1, 0) or rows.element != columns.element:
        raise ValueError(
            "two orientations need a matrix, axes -1 and -2 and one element format; got "
            f"shape {tuple(x.shape)}, axes {rows.axis} and {columns.axis}, {rows.element} and {columns.element}"
        )


def qdq_two(
    x: Tensor, rows: MXFP8Options, columns: MXFP8Options, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise and dequantise a matrix [M, K] along K (``rows``) and along M (``columns``); reads x once on a GPU.

    Returns:
        Both operands, each equal to its :func:`qdq`, and the number of non-finite blocks of both.

    Raises:
        TypeError, ValueError: as :func:`qdq`, and for another number of dimensions, other axes or two formats.
    """
    mxfp8.check_input(x)
    _check_two(x, rows, columns)
    dtype = out_dtype or x.dtype
    check_output(dtype)
    for options in (rows, columns):
        layout_of(x.shape, options.layout)
    if not (rows.block == columns.block == "1d" and x.numel() and kernel_path(x.device).uses_kernels):
        (by_rows, one), (by_columns, other) = (qdq(x, options, out_dtype=out_dtype) for options in (rows, columns))
        return by_rows, by_columns, one + other
    from engine.kernels import launch

    outs = (torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(x.shape, dtype=dtype, device=x.device))
    count = torch.zeros(2, dtype=torch.int64, device=x.device)
    operands = Operand.of_fp8(rows, 2), Operand.of_fp8(columns, 2)
    draws = launch.NO_DRAW, launch.NO_DRAW
    launch.quantise_two(x.detach().contiguous(), *operands, draws, outs, (None, None), count).run()
    return *outs, count.sum()
