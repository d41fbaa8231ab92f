"""MXFP4 quantisation in plain PyTorch: the definition, and the CPU path (OCP MX v1.0, section 6.3).

A block of 32 values along one axis, or a 32x32 tile, shares one E8M0 scale; each value divided by it is rounded to
E2M1. Blocks that hold an Inf or a NaN get scale code 255 and dequantise to NaN; they are counted, never made finite.
Finite values never become Inf. An all-zero block stays zero; signs of zero are kept.

No function here is differentiable; the layers put the straight-through estimator around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.formats import e2m1, e8m0
from engine.formats.hadamard import Hadamard
from engine.formats.options import BLOCK_SIZE, OperandOptions
from engine.formats.philox import noise16_flat
from engine.formats.scale import codes_from_bits

_CPU_CHUNK = 1 << 18
"""Elements worked on at a time on a CPU, so that the handful of fp32 scratch tensors stays in the cache."""
_DTYPES = (torch.float32, torch.bfloat16)
_CLIP_IN = 0.75
_CLIP_OUT = float(torch.tensor(4.0 / 3.0, dtype=torch.float32))


@dataclass(frozen=True, kw_only=True, slots=True)
class MXFP4Tensor:
    """A quantised tensor: packed E2M1 codes and E8M0 scales."""

    codes: Tensor
    """uint8, two codes a byte along ``axis`` (half its size there): the even index is the low nibble."""
    scales: Tensor
    """uint8 E8M0, one a block: the logical shape with ``axis`` / 32, or the last two dimensions / 32 for ``2d``."""
    axis: int
    """The quantised axis, not negative."""
    block: Literal["1d", "2d"]
    """Shape of a block: 32 values along ``axis``, or 32x32 over the last two dimensions."""
    shape: torch.Size
    """Logical shape."""
    clip: Literal["none", "static"]
    """``static``: dequantised values are multiplied by fp32(4/3)."""

    @property
    def nonfinite_blocks(self) -> Tensor:
        """Number of blocks that held an Inf or a NaN, 0-dim int64."""
        return (self.scales == e8m0.NAN_CODE).sum()

    def unpacked_codes(self) -> Tensor:
        """Return the codes 0..15, uint8, in the logical shape."""
        return e2m1.unpack(self.codes, self.axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The logical tensor as [block rows, ...] without moving a value: row-major order is the same in both."""

    view: tuple[int, ...]
    """[n, 32] blocks along the last axis; [n, 32, inner] along another; [n, 32, cols/32, 32] tiles."""
    scales: tuple[int, ...]
    """Shape of the scale codes."""
    axis: int
    """The quantised axis, not negative."""


def layout_of(shape: torch.Size, options: OperandOptions) -> Layout:
    ndim = len(shape)
    if not -ndim <= options.axis < ndim:
        raise ValueError(f"axis {options.axis} is out of range for a tensor of shape {tuple(shape)}")
    axis = options.axis % ndim
    tiled = options.block == "2d"
    if tiled and (ndim < 2 or axis < ndim - 2):
        raise ValueError(
            f"2d blocks need the axis among the last two dimensions; got axis {options.axis} of shape {tuple(shape)}"
        )
    scales = list(shape)
    for dim in (ndim - 2, ndim - 1) if tiled else (axis,):
        if shape[dim] % BLOCK_SIZE:
            raise ValueError(
                f"axis {dim} of shape {tuple(shape)} has {shape[dim]} values, not a multiple of {BLOCK_SIZE}: "
                f"{BLOCK_SIZE} values along it share a scale; pad it or leave this operand unquantised"
            )
        scales[dim] //= BLOCK_SIZE
    outer = math.prod(shape[:axis])
    if tiled:
        rows = math.prod(shape[:-1])
        view: tuple[int, ...] = (rows // BLOCK_SIZE, BLOCK_SIZE, shape[-1] // BLOCK_SIZE, BLOCK_SIZE)
    elif axis == ndim - 1:
        view = (outer * shape[axis] // BLOCK_SIZE, BLOCK_SIZE)
    else:
        view = (outer * shape[axis] // BLOCK_SIZE, BLOCK_SIZE, math.prod(shape[axis + 1 :]))
    return Layout(view=view, scales=tuple(scales), axis=axis)


def check_call(
    x: Tensor, options: OperandOptions, key: int | None, transform: Hadamard | None, row_offset: int
) -> None:
    """Raise for everything wrong with a call but its shape."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"cannot quantise {x.dtype}: convert the tensor to torch.float32 or torch.bfloat16 first")
    problems = []
    if options.rounding == "sr" and key is None:
        problems.append("rounding 'sr' needs a key; pass key=combine_keys(step_key(...), operand_key(...))")
    if options.rounding == "rtn" and key is not None:
        problems.append("a key was given, but rounding 'rtn' draws no noise")
    if key is not None and not 0 <= key < 1 << 64:
        problems.append(f"key {key} is not in 0..2^64 - 1")
    if row_offset < 0:
        problems.append(f"row_offset {row_offset} is negative")
    kind = "none" if transform is None else transform.kind
    if kind != options.hadamard:
        problems.append(
            f"hadamard {options.hadamard!r} was asked for, but the transform given is {kind!r}; "
            "pass the one of make_hadamard(options.hadamard, ...)"
        )
    if problems:
        raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """A run of block rows after rounding."""

    rows: slice
    """Which rows of the layout's view."""
    values: Tensor
    """fp32 E2M1 values, shape of the view's rows; undefined in non-finite blocks."""
    scale_codes: Tensor
    """int32, broadcastable to ``values``."""


def _round_chunks(
    x: Tensor, layout: Layout, options: OperandOptions, *, key: int | None, transform: Hadamard | None, row_offset: int
) -> Iterator[_Chunk]:
    """Yield the rounded values of x and their scales, a chunk of block rows at a time."""
    blocks = x.reshape(layout.view)
    row_elements = math.prod(layout.view[1:])
    rows = len(blocks) if x.device.type != "cpu" else max(1, _CPU_CHUNK // row_elements)
    first_element = row_offset * x.shape[-1]
    for start in range(0, len(blocks), rows):
        part = blocks[start : start + rows]
        if transform is not None:
            values = transform.apply(part, axis=1)
            magnitudes = values.abs()
        else:
            values = part.to(torch.float32)
            magnitudes = torch.abs(values)
        bits = magnitudes.view(torch.int32)
        amax = bits.amax(dim=-1, keepdim=True) if part.ndim != 3 else bits.amax(dim=1, keepdim=True)
        if part.ndim == 4:
            amax = amax.amax(dim=1, keepdim=True)
        codes = codes_from_bits(amax, options.scale_mode)
        if options.clip == "static":
            values = values * _CLIP_IN
        q = torch.mul(values, e8m0.reciprocal(codes))
        if key is None:
            rounded = e2m1.round_nearest_(q, scratch=magnitudes)
        else:
            noise = noise16_flat(key, first_element + start * row_elements, part.numel(), x.device)
            rounded = e2m1.round_stochastic_(q, noise.view(part.shape), scratch=magnitudes)
        yield _Chunk(rows=slice(start, start + rows), values=rounded, scale_codes=codes)


def check_output(dtype: torch.dtype) -> None:
    if dtype not in _DTYPES:
        raise TypeError(f"cannot dequantise to {dtype}: ask for torch.float32 or torch.bfloat16 and convert the result")


def _scaled(values: Tensor, scale_codes: Tensor, clip: str, dtype: torch.dtype) -> Tensor:
    """Return values times their scales, in place; with static clip times fp32(4/3), capped at ``dtype``'s largest."""
    values.mul_(e8m0.decode(scale_codes))
    if clip == "static":
        limit = torch.finfo(dtype).max
        values.mul_(_CLIP_OUT).clamp_(-limit, limit)
    return values


def quantise(
    x: Tensor,
    options: OperandOptions,
    *,
    key: int | None = None,
    transform: Hadamard | None = None,
    row_offset: int = 0,
) -> MXFP4Tensor:
    """Quantise a tensor to MXFP4.

    Args:
        x: float32 or bfloat16, any strides; the quantised axis (both last dimensions for 2D blocks) a multiple of 32.
        options: blocks, axis, scale mode, rounding, transform and clip.
        key: 64-bit noise key, for stochastic rounding and only then.
        transform: the Hadamard transform that ``options.hadamard`` names. The result holds the transformed values.
        row_offset: index of x's first row (of the last dimension's length) in the logical operand; shifts the noise.

    Raises:
        TypeError: for another dtype.
        ValueError: for a size that is no multiple of 32, or a key or transform missing, superfluous or of another kind.
    """
    check_call(x, options, key, transform, row_offset)
    layout = layout_of(x.shape, options)
    codes = torch.empty(layout.view, dtype=torch.uint8, device=x.device)
    scales = torch.empty(layout.scales, dtype=torch.uint8, device=x.device)
    if x.numel():
        tops = scales.view(len(codes), -1)
        with torch.no_grad():
            for chunk in _round_chunks(x, layout, options, key=key, transform=transform, row_offset=row_offset):
                finite = (chunk.scale_codes != e8m0.NAN_CODE).to(torch.uint8)
                codes[chunk.rows] = e2m1.encode(chunk.values).mul_(finite)
                tops[chunk.rows] = chunk.scale_codes.reshape(len(chunk.values), -1).to(torch.uint8)
    return MXFP4Tensor(
        codes=e2m1.pack(codes.view(x.shape), layout.axis),
        scales=scales,
        axis=layout.axis,
        block=options.block,
        shape=x.shape,
        clip=options.clip,
    )


def dequantise(q: MXFP4Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a quantised tensor in its logical shape, exact in float32 and bfloat16 without clip.

    With static clip the fp32 product with fp32(4/3) is rounded once more to bfloat16, and values beyond the largest of
    ``dtype`` become it.
    """
    check_output(dtype)
    layout = layout_of(q.shape, OperandOptions(block=q.block, axis=q.axis))
    values = e2m1.decode(q.unpacked_codes()).view(layout.view)
    per_block = [1 if size == BLOCK_SIZE and i in (1, 3) else size for i, size in enumerate(layout.view)]
    return _scaled(values, q.scales.reshape(per_block), q.clip, dtype).view(q.shape).to(dtype)


def qdq(
    x: Tensor,
    options: OperandOptions,
    *,
    key: int | None = None,
    transform: Hadamard | None = None,
    row_offset: int = 0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise and dequantise without packing; equal bit for bit to ``dequantise(quantise(x, ...), out_dtype)``.

    Takes the arguments of :func:`quantise`, and raises as it does.

    Returns:
        The values in ``out_dtype`` (float32 or bfloat16; default x's), contiguous and of x's shape, and the number of
        non-finite blocks as a 0-dim int64 tensor on x's device, so that counting does not wait for the device.
    """
    check_call(x, options, key, transform, row_offset)
    layout = layout_of(x.shape, options)
    dtype = out_dtype or x.dtype
    check_output(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=x.device)
    if x.numel():
        out_blocks = out.view(layout.view)
        with torch.no_grad():
            for chunk in _round_chunks(x, layout, options, key=key, transform=transform, row_offset=row_offset):
                out_blocks[chunk.rows] = _scaled(chunk.values, chunk.scale_codes, options.clip, dtype)
                nonfinite += (chunk.scale_codes == e8m0.NAN_CODE).sum()
    return out, nonfinite
