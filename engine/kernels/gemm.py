"""Packed x packed MXFP4 GEMM: y[M, N] = A[M, K]·B[K, N], both operands quantised along K, fp32 accumulation.

The three GEMMs of a Linear layer with x [M, K], w [N, K], dy [M, N]:

=====  ==============================================  ======================================
GEMM   A                                               B
=====  ==============================================  ======================================
fprop  x, axis -1                                      ``transpose(w)``, w with axis -1
dgrad  dy, axis -1                                     w, axis -2 (``repack`` turns 2D tiles)
wgrad  ``transpose(dy)``, dy with axis -2              x, axis -2
=====  ==============================================  ======================================

On gfx950 and sm_100 the products run in the scaled matrix units (``tl.dot_scaled``); elsewhere the kernel decodes to
bfloat16, where every MXFP4 value is exact, and multiplies there. Both give the exact products summed in fp32, in an
order that differs. Static clip multiplies the sum by 4/3 an operand, once, in fp32.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.formats import MXFP4Tensor
from engine.formats.e2m1 import pack, unpack
from engine.kernels.gemm_kernel import gemm_kernel, repack_kernel
from engine.kernels.mx_units import has_mx_units

_CLIP_OUT = 4.0 / 3.0
_OUT_DTYPES = (torch.float32, torch.bfloat16)
INTERPRETED = not isinstance(gemm_kernel, triton.runtime.JITFunction)
"""True when Triton runs kernels in its interpreter (TRITON_INTERPRET=1), which takes CPU tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmTile:
    """Shape of a program of the GEMM kernel."""

    bm: int = 128
    """Rows of y; the scaled tensor-core instruction of sm_100 needs 128."""
    bn: int = 128
    """Columns of y."""
    bk: int = 128
    """Values along the summed axis in one step; a multiple of 32."""
    band: int = 8
    """Rows of tiles that run together, for the L2 cache."""
    num_warps: int = 8
    """Warps of a program (sm_100's instruction needs 4 or 8)."""
    num_stages: int = 3
    """Steps loaded ahead."""

    @classmethod
    def default(cls, *, native: bool) -> GemmTile:
        """Return a shape that spills no register in any layout, as ``engine.kernels.lowering`` reports it.

        The native one is large, for reuse from shared memory; it has been compiled for gfx950 and sm_100, not timed.
        """
        return cls(bn=256, bk=256) if native else cls(bk=64)


def transpose(q: MXFP4Tensor) -> MXFP4Tensor:
    """Return the transpose of the last two dimensions as a view: no byte moves.

    Raises:
        ValueError: if the quantised axis is not one of the last two.
    """
    last = len(q.shape) - 1
    if last < 1 or q.axis < last - 1:
        raise ValueError(f"cannot transpose shape {tuple(q.shape)} quantised along axis {q.axis}")
    return dataclasses.replace(
        q,
        codes=q.codes.transpose(-1, -2),
        scales=q.scales.transpose(-1, -2),
        axis=2 * last - 1 - q.axis,
        shape=torch.Size((*q.shape[:-2], q.shape[-1], q.shape[-2])),
    )


def repack(q: MXFP4Tensor, axis: int) -> MXFP4Tensor:
    """Pack the codes of a tensor of 32x32 tiles along the other of its last two dimensions; the values stay.

    Raises:
        ValueError: for 1D blocks, whose scales belong to one axis, or an axis before the last two.
    """
    ndim = len(q.shape)
    axis %= ndim
    if q.block != "2d" or axis < ndim - 2:
        raise ValueError(f"only 2d tiles can be packed along another axis (got block {q.block!r}, axis {axis})")
    if axis == q.axis or q.codes.numel() == 0:
        codes = q.codes if axis == q.axis else pack(unpack(q.codes, q.axis), axis)
        return dataclasses.replace(q, codes=codes, axis=axis)
    if q.codes.device.type == "cpu" and not INTERPRETED:
        return dataclasses.replace(q, codes=pack(unpack(q.codes, q.axis), axis), axis=axis)
    rows, cols = q.shape[-2:]
    source = q.codes.reshape(-1, *q.codes.shape[-2:])
    target_shape = (rows, cols // 2) if axis == ndim - 1 else (rows // 2, cols)
    target = torch.empty((len(source), *target_shape), dtype=torch.uint8, device=source.device)
    # i counts pairs along the new axis, j bytes along the old one.
    old, new = (2, 1) if q.axis == ndim - 1 else (1, 2)
    pairs, length = source.shape[new] // 2, source.shape[old]
    grid = (triton.cdiv(pairs, 32) * triton.cdiv(length, 128), len(source))
    repack_kernel[grid](
        source,
        target,
        pairs,
        length,
        source.stride(0),
        source.stride(new),
        source.stride(old),
        target.stride(0),
        target.stride(new),
        target.stride(old),
        BI=32,
        BJ=128,
    )
    return dataclasses.replace(q, codes=target.view(*q.shape[:-2], *target_shape), axis=axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """One side of a GEMM as the kernel takes it."""

    values: Tensor
    """Packed codes, or the values themselves."""
    scales: Tensor | None
    """E8M0 codes of a packed operand."""
    strides: tuple[int, int, int]
    """Of ``values``: group (0 without), outer axis, summed axis."""
    scale_strides: tuple[int, int, int]
    """Of ``scales``, likewise."""
    tiled: bool
    """Whether 32 outer rows share a scale."""


def packed_operand(q: MXFP4Tensor, *, axis: int) -> Operand:
    """Describe a packed operand whose summed axis is ``axis`` (-1 for A, -2 for B).

    Raises:
        ValueError: if it was quantised along another axis.
    """
    ndim = len(q.shape)
    if q.axis != axis % ndim:
        fix = "repack() packs 2d tiles along the other axis" if q.block == "2d" else "quantise it along that axis"
        raise ValueError(
            f"an operand of shape {tuple(q.shape)} is summed over axis {axis % ndim}, but quantised along axis "
            f"{q.axis}; {fix}"
        )
    order = (-2, -1) if axis == -1 else (-1, -2)
    strides, scale_strides = (
        (t.stride(0) if ndim == 3 else 0, t.stride(order[0]), t.stride(order[1])) for t in (q.codes, q.scales)
    )
    return Operand(values=q.codes, scales=q.scales, strides=strides, scale_strides=scale_strides, tiled=q.block == "2d")


def plain_operand(x: Tensor, *, axis: int) -> Operand:
    """Describe an unquantised operand whose summed axis is ``axis`` (-1 for A, -2 for B)."""
    outer = -2 if axis == -1 else -1
    strides = (x.stride(0) if x.ndim == 3 else 0, x.stride(outer), x.stride(axis))
    return Operand(values=x, scales=None, strides=strides, scale_strides=(0, 0, 0), tiled=False)


def alpha(a: MXFP4Tensor, b: MXFP4Tensor) -> float:
    """Return the factor that static clip leaves to the product: 4/3 for each clipped operand."""
    return _CLIP_OUT ** ((a.clip == "static") + (b.clip == "static"))


def launch(
    a: Operand,
    b: Operand,
    y: Tensor,
    *,
    m: int,
    n: int,
    k: int,
    grid: tuple[int, ...],
    tile: GemmTile,
    native: bool,
    factor: float = 1.0,
    ends: Tensor | None = None,
    grouped: int = 0,
) -> None:
    """Start the kernel that writes y = factor·A·B; see :func:`engine.kernels.gemm_kernel.gemm_kernel`."""
    packed = a.scales is not None
    _check_strides(a, b, y, tile)
    gemm_kernel[grid](
        a.values,
        a.values if a.scales is None else a.scales,
        b.values,
        b.values if b.scales is None else b.scales,
        y,
        y if ends is None else ends,
        m,
        n,
        k,
        0 if ends is None else len(ends),
        a.strides[1],
        a.strides[2],
        a.scale_strides[1],
        a.scale_strides[2],
        b.strides[0],
        b.strides[2],
        b.strides[1],
        b.scale_strides[0],
        b.scale_strides[2],
        b.scale_strides[1],
        y.stride(0) if grouped == 2 else 0,
        y.stride(-2),
        y.stride(-1),
        ALPHA=factor,
        PACKED=packed,
        NATIVE=native,
        DOT=_dot_dtype(a.values.dtype),
        GROUPED=grouped,
        SLOTS=triton.next_power_of_2(len(ends) + 1) if ends is not None else 1,
        A_TILED=a.tiled,
        B_TILED=b.tiled,
        MASK_M=grouped == 1 or m % tile.bm != 0,
        MASK_N=n % tile.bn != 0,
        MASK_K=grouped == 2 or k % tile.bk != 0,
        BM=tile.bm,
        BN=tile.bn,
        BK=tile.bk,
        BAND=tile.band,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _check_strides(a: Operand, b: Operand, y: Tensor, tile: GemmTile) -> None:
    """Raise ValueError where an offset inside a tile would not fit into 31 bits."""
    longest = max(*a.strides[1:], *b.strides[1:], *y.stride()[-2:])
    reach = longest * max(tile.bm, tile.bn, tile.bk)
    if reach >= 1 << 31:
        raise ValueError(
            f"an operand has a stride of {longest} elements; {max(tile.bm, tile.bn, tile.bk)} of them exceed 2^31, "
            "which the kernel's offsets inside a tile cannot hold. Make the tensor contiguous"
        )


def _dot_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float32 if INTERPRETED or dtype == torch.float32 else tl.bfloat16


def check_device(*tensors: Tensor) -> None:
    """Raise ValueError unless all tensors are on one device on which kernels can run."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        raise ValueError(f"operands are on different devices: {', '.join(sorted(map(str, devices)))}")
    if tensors[0].device.type == "cpu" and not INTERPRETED:
        raise ValueError("the packed GEMM kernels need a GPU (or TRITON_INTERPRET=1); on a CPU use dequantise() and @")


def packed_matmul(
    a: MXFP4Tensor,
    b: MXFP4Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    native: bool | None = None,
    tile: GemmTile | None = None,
) -> Tensor:
    """Multiply two packed MXFP4 matrices.

    Args:
        a: [M, K], quantised along K (axis 1), 1D blocks or 32x32 tiles.
        b: [K, N], quantised along K (axis 0), likewise.
        out_dtype: float32 or bfloat16; the fp32 sum is rounded once.
        native: use the scaled matrix units; None asks the device.
        tile: program shape; None takes the default.

    Returns:
        [M, N], contiguous. A non-finite block makes the row (or column) it meets NaN.

    Raises:
        ValueError: for shapes that do not match, operands quantised along another axis, mixed devices, or a CPU
            without the interpreter.
        TypeError: for another output dtype.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}; expected [M, K] and [K, N]")
    check_out_dtype(out_dtype)
    check_device(a.codes, a.scales, b.codes, b.scales)
    (m, k), n = a.shape, b.shape[1]
    left, right = packed_operand(a, axis=-1), packed_operand(b, axis=-2)
    y = torch.empty(m, n, dtype=out_dtype, device=a.codes.device)
    if k == 0:
        return y.zero_()
    if m and n:
        native = has_mx_units(y.device) if native is None else native
        tile = tile or GemmTile.default(native=native)
        grid = (triton.cdiv(m, tile.bm) * triton.cdiv(n, tile.bn),)
        launch(left, right, y, m=m, n=n, k=k, grid=grid, tile=tile, native=native, factor=alpha(a, b))
    return y


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless the kernel writes this dtype."""
    if dtype not in _OUT_DTYPES:
        raise TypeError(f"cannot write the product as {dtype}; ask for torch.float32 or torch.bfloat16")
