"""The functions of ``engine.formats`` for any device: kernels where they run, the CPU path or the reference elsewhere.

Same arguments, results, errors and bits as :mod:`engine.formats.mxfp4`, and beyond them: the key and the transform may
be device tensors, so that nothing of a step is a constant of a captured CUDA graph and nothing waits for the device;
the count of non-finite blocks may go into a counter that the caller keeps; :func:`qdq_two` reads x once for both
orientations. Non-contiguous tensors are copied once before a kernel reads them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.formats import Hadamard, MXFP4Tensor, OperandOptions, mxfp4
from engine.kernels import cpu
from engine.kernels.hadamard import DeviceHadamard, key_number, key_tensor, on_device
from engine.kernels.operand import Operand
from engine.kernels.probe import kernel_path

if TYPE_CHECKING:
    from engine.kernels.launch import Draw

Key = int | Tensor | None
Transform = Hadamard | DeviceHadamard | None


def _check(x: Tensor, options: OperandOptions, key: Key, transform: Transform, row_offset: int) -> None:
    """Raise what the reference raises, and for tensors of the wrong kind or on another device."""
    if isinstance(key, Tensor) and (key.numel() != 1 or key.dtype != torch.int64):
        raise ValueError(f"a key tensor holds one int64; got {key.dtype} of shape {tuple(key.shape)}")
    mxfp4.check_call(x, options, 0 if isinstance(key, Tensor) else key, transform, row_offset)  # type: ignore[arg-type]
    for name, tensor in (
        ("key", key if isinstance(key, Tensor) else None),
        ("transform", transform.signs if isinstance(transform, DeviceHadamard) else None),
    ):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"x is on {x.device} but the {name} on {tensor.device}; move it to x's device")


def _check_counter(x: Tensor, counter: Tensor | None) -> None:
    if counter is not None and (
        counter.dtype != torch.int64 or counter.ndim != 0 or counter.device != x.device or counter.requires_grad
    ):
        raise ValueError(
            f"the counter of non-finite blocks must be a 0-dim int64 tensor on {x.device}; "
            f"got {counter.dtype} of shape {tuple(counter.shape)} on {counter.device}"
        )


def _host_key(key: Key) -> int | None:
    return key_number(key) if isinstance(key, Tensor) else key


def _host_transform(transform: Transform) -> Hadamard | None:
    return transform.to_transform() if isinstance(transform, DeviceHadamard) else transform


def _draw(x: Tensor, key: Key, transform: Transform, row_offset: int) -> Draw:
    from engine.kernels.launch import Draw

    return Draw(
        key=key_tensor(key, x.device) if isinstance(key, int) else key,
        transform=on_device(transform, x.device) if isinstance(transform, Hadamard) else transform,
        first=row_offset * x.shape[-1],
    )


def _added(counter: Tensor | None, count: Tensor) -> Tensor:
    return count if counter is None else counter.add_(count)


def qdq(
    x: Tensor,
    options: OperandOptions,
    *,
    key: Key = None,
    transform: Transform = None,
    row_offset: int = 0,
    out_dtype: torch.dtype | None = None,
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise and dequantise, as :func:`engine.formats.qdq`.

    Args:
        x, options, row_offset, out_dtype: as there.
        key: number, or int64 tensor of one element on x's device with the same 64 bits.
        transform: Hadamard transform, or its device form on x's device.
        counter: 0-dim int64 tensor to add the number of non-finite blocks to, instead of to a new one.

    Returns:
        The values and the count or, if given, the counter.

    Raises:
        TypeError, ValueError: as there, and for a key, transform or counter that does not fit x.
    """
    _check(x, options, key, transform, row_offset)
    _check_counter(x, counter)
    layout = mxfp4.layout_of(x.shape, options)
    dtype = out_dtype or x.dtype
    mxfp4.check_output(dtype)
    path = kernel_path(x.device)
    if x.numel() == 0 or not path.uses_kernels:
        run = cpu.qdq if path.path == "compiled" else mxfp4.qdq
        values, count = run(
            x,
            options,
            key=_host_key(key),
            transform=_host_transform(transform),
            row_offset=row_offset,
            out_dtype=out_dtype,
        )
        return values, _added(counter, count)
    from engine.kernels import launch

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    count = torch.zeros((), dtype=torch.int64, device=x.device) if counter is None else counter
    operand = Operand.of(options, x.ndim)
    assert operand.axis == layout.axis
    launch.quantise(x.detach().contiguous(), operand, _draw(x, key, transform, row_offset), out, None, count).run()
    return out, count


def quantise(
    x: Tensor, options: OperandOptions, *, key: Key = None, transform: Transform = None, row_offset: int = 0
) -> MXFP4Tensor:
    """Quantise to packed codes and scales, as :func:`engine.formats.quantise`; key and transform as in :func:`qdq`."""
    _check(x, options, key, transform, row_offset)
    layout = mxfp4.layout_of(x.shape, options)
    if x.numel() == 0 or not kernel_path(x.device).uses_kernels:
        return mxfp4.quantise(
            x, options, key=_host_key(key), transform=_host_transform(transform), row_offset=row_offset
        )
    from engine.kernels import launch

    packed = _empty_packed(x, options, layout)
    operand = Operand.of(options, x.ndim)
    draw = _draw(x, key, transform, row_offset)
    launch.quantise(x.detach().contiguous(), operand, draw, packed.codes, packed.scales, None).run()
    return packed


def _empty_packed(x: Tensor, options: OperandOptions, layout: mxfp4.Layout) -> MXFP4Tensor:
    halved = [size // 2 if dim == layout.axis else size for dim, size in enumerate(x.shape)]
    return MXFP4Tensor(
        codes=torch.empty(halved, dtype=torch.uint8, device=x.device),
        scales=torch.empty(layout.scales, dtype=torch.uint8, device=x.device),
        axis=layout.axis,
        block=options.block,
        shape=x.shape,
        clip=options.clip,
    )


def dequantise(q: MXFP4Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a quantised tensor, as :func:`engine.formats.dequantise`.

    Raises:
        TypeError: for another dtype than float32 and bfloat16.
        ValueError: if codes and scales are on different devices.
    """
    if q.codes.device != q.scales.device:
        raise ValueError(f"codes are on {q.codes.device} but scales on {q.scales.device}; put both on one device")
    mxfp4.check_output(dtype)
    if math.prod(q.shape) == 0 or not kernel_path(q.codes.device).uses_kernels:
        return mxfp4.dequantise(q, dtype)
    from engine.kernels import launch

    operand = Operand.of(OperandOptions(block=q.block, axis=q.axis, clip=q.clip), len(q.shape))
    out = torch.empty(q.shape, dtype=dtype, device=q.codes.device)
    launch.dequantise(q.codes.contiguous(), q.scales.contiguous(), q.shape, operand, out).run()
    return out


def _fused(x: Tensor, rows: OperandOptions, columns: OperandOptions, row_offset: int) -> bool:
    """Tell whether the two-orientation kernel serves these operands of a matrix."""
    return (
        rows.block == columns.block == "1d"
        and rows.hadamard == "none"
        and x.numel() > 0
        and row_offset * x.shape[1] % 8 == 0
        and kernel_path(x.device).uses_kernels
    )


def _check_two(x: Tensor, rows: OperandOptions, columns: OperandOptions) -> None:
    if x.ndim != 2:
        raise ValueError(f"two orientations need a matrix; got shape {tuple(x.shape)}")
    axes = (rows.axis % 2 if -2 <= rows.axis < 2 else None, columns.axis % 2 if -2 <= columns.axis < 2 else None)
    if axes != (1, 0):
        raise ValueError(
            f"the row-wise operand needs axis -1 and the column-wise one axis -2; got {rows.axis} and {columns.axis}"
        )


def qdq_two(
    x: Tensor,
    rows: OperandOptions,
    columns: OperandOptions,
    *,
    rows_key: Key = None,
    columns_key: Key = None,
    rows_transform: Transform = None,
    columns_transform: Transform = None,
    row_offset: int = 0,
    out_dtype: torch.dtype | None = None,
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise and dequantise a matrix along its rows and down its columns.

    On a GPU x is read once if both operands have 1D blocks and the row-wise one no transform; else as two calls.

    Args:
        x: float32 or bfloat16 [M, K], both multiples of 32.
        rows: options of the operand that is summed along K (axis -1).
        columns: options of the operand that is summed along M (axis -2).
        rows_key, rows_transform: as in :func:`qdq`, for the row-wise operand.
        columns_key, columns_transform: likewise for the column-wise one.
        row_offset, out_dtype, counter: as in :func:`qdq`, for both.

    Returns:
        Both operands [M, K], contiguous, each equal to its :func:`qdq`, and the number of non-finite blocks of both.

    Raises:
        TypeError, ValueError: as :func:`qdq`, and for another number of dimensions or other axes.
    """
    _check_two(x, rows, columns)
    _check(x, rows, rows_key, rows_transform, row_offset)
    _check(x, columns, columns_key, columns_transform, row_offset)
    _check_counter(x, counter)
    for options in (rows, columns):
        mxfp4.layout_of(x.shape, options)
    dtype = out_dtype or x.dtype
    mxfp4.check_output(dtype)
    if not _fused(x, rows, columns, row_offset):
        shared = {"row_offset": row_offset, "out_dtype": out_dtype, "counter": counter}
        by_rows, count = qdq(x, rows, key=rows_key, transform=rows_transform, **shared)
        by_columns, other = qdq(x, columns, key=columns_key, transform=columns_transform, **shared)
        return by_rows, by_columns, count + other if counter is None else counter
    from engine.kernels import launch

    outs = (torch.empty(x.shape, dtype=dtype, device=x.device), torch.empty(x.shape, dtype=dtype, device=x.device))
    counts = torch.zeros(2, dtype=torch.int64, device=x.device)
    launch.quantise_two(
        x.detach().contiguous(),
        Operand.of(rows, 2),
        Operand.of(columns, 2),
        (_draw(x, rows_key, None, row_offset), _draw(x, columns_key, columns_transform, row_offset)),
        outs,
        (None, None),
        counts,
    ).run()
    return *outs, _added(counter, counts.sum())


def quantise_two(
    x: Tensor,
    rows: OperandOptions,
    columns: OperandOptions,
    *,
    rows_key: Key = None,
    columns_key: Key = None,
    rows_transform: Transform = None,
    columns_transform: Transform = None,
    row_offset: int = 0,
) -> tuple[MXFP4Tensor, MXFP4Tensor]:
    """Quantise a matrix to packed operands in both orientations; arguments and errors as :func:`qdq_two`."""
    _check_two(x, rows, columns)
    _check(x, rows, rows_key, rows_transform, row_offset)
    _check(x, columns, columns_key, columns_transform, row_offset)
    layouts = [mxfp4.layout_of(x.shape, options) for options in (rows, columns)]
    if not _fused(x, rows, columns, row_offset):
        return (
            quantise(x, rows, key=rows_key, transform=rows_transform, row_offset=row_offset),
            quantise(x, columns, key=columns_key, transform=columns_transform, row_offset=row_offset),
        )
    from engine.kernels import launch

    by_rows, by_columns = _empty_packed(x, rows, layouts[0]), _empty_packed(x, columns, layouts[1])
    launch.quantise_two(
        x.detach().contiguous(),
        Operand.of(rows, 2),
        Operand.of(columns, 2),
        (_draw(x, rows_key, None, row_offset), _draw(x, columns_key, columns_transform, row_offset)),
        (by_rows.codes, by_columns.codes),
        (by_rows.scales, by_columns.scales),
        torch.zeros(2, dtype=torch.int64, device=x.device),
    ).run()
    return by_rows, by_columns
