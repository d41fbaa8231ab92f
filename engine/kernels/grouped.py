"""Grouped GEMMs for mixtures of experts: group sizes live on the device, nothing here waits for it.

Rows are sorted by expert; ``ends`` (int32 [E]) holds the cumulative end of each expert's rows. Every group is padded
with zero rows to a multiple of 32, so that no quantisation block spans two experts; a group may be empty. The padded
tensor has a fixed number of rows, an upper bound that depends on shapes alone; what lies behind the last group (the
tail) is written as zeros.

=====  =====================================  ==========================  =============
GEMM   A                                      B                           result
=====  =====================================  ==========================  =============
fprop  x [R, K]                               w [E, N, K], transposed     y [R, N]
dgrad  dy [R, N]                              w [E, N, K]                 dx [R, K]
wgrad  dy [R, N], transposed                  x [R, K]                    dw [E, N, K]
=====  =====================================  ==========================  =============

:func:`grouped_matmul` is fprop and dgrad, :func:`grouped_wgrad` is wgrad, each for plain operands (a QDQ'd tensor is
one) or packed MXFP4 ones. The weight gradient of an empty group is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.formats import BLOCK_SIZE, MXFP4Tensor
from engine.kernels.gemm import (
    INTERPRETED,
    GemmTile,
    Operand,
    alpha,
    check_device,
    check_out_dtype,
    launch,
    packed_operand,
    plain_operand,
)
from engine.kernels.gemm_kernel import zero_tail_kernel
from engine.kernels.mx_units import has_mx_units

Implementation = Literal["torch", "triton"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedGroups:
    """Where the rows of a batch sorted by expert go when each group is padded to a multiple of 32."""

    ends: Tensor
    """int32 [E]: end of each padded group; a multiple of 32."""
    rows: Tensor
    """int64 [T]: padded position of each row."""
    num_rows: int
    """Rows of the padded tensor: T + 31·E, rounded down to a multiple of 32; no routing needs more."""

    def pad(self, x: Tensor) -> Tensor:
        """Return x [T, ...] in its padded places [num_rows, ...], zeros elsewhere; differentiable."""
        if len(x) != len(self.rows):
            raise ValueError(f"x has {len(x)} rows, the groups hold {len(self.rows)}")
        return x.new_zeros(self.num_rows, *x.shape[1:]).index_copy(0, self.rows, x)

    def unpad(self, y: Tensor) -> Tensor:
        """Return the rows of y [num_rows, ...] in their order before :meth:`pad`, [T, ...]; differentiable."""
        if len(y) != self.num_rows:
            raise ValueError(f"y has {len(y)} rows, expected the {self.num_rows} padded ones")
        return y.index_select(0, self.rows)


def pad_groups(sizes: Tensor, *, num_tokens: int) -> PaddedGroups:
    """Lay out groups padded to multiples of 32 rows, without waiting for the device.

    Args:
        sizes: integer [E], rows of each expert, in order, on the device of the rows.
        num_tokens: T, the sum of ``sizes``; checked on the device.

    Raises:
        ValueError: for a tensor that is no vector of integers, or a negative number of tokens.
        RuntimeError: if the sizes do not add up to T (on a GPU, asynchronously).
    """
    if sizes.ndim != 1 or sizes.dtype not in (torch.int32, torch.int64) or len(sizes) == 0:
        raise ValueError(f"sizes must be int32 or int64 [experts]; got {sizes.dtype} {tuple(sizes.shape)}")
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}")
    sizes = sizes.to(torch.int64)
    ends = sizes.cumsum(0)
    torch._assert_async(ends[-1] == num_tokens, f"group sizes do not add up to the {num_tokens} tokens given")
    padded_ends = ((sizes + (BLOCK_SIZE - 1)) // BLOCK_SIZE * BLOCK_SIZE).cumsum(0)
    shift = padded_ends - ends  # of a group's end, by its own padding and that of the groups before
    own = (-sizes) % BLOCK_SIZE
    token = torch.arange(num_tokens, device=sizes.device)
    expert = torch.searchsorted(ends, token, right=True).clamp_max_(len(sizes) - 1)
    return PaddedGroups(
        ends=padded_ends.to(torch.int32),
        rows=token + (shift - own)[expert],
        num_rows=(num_tokens + (BLOCK_SIZE - 1) * len(sizes)) // BLOCK_SIZE * BLOCK_SIZE,
    )


def _check_ends(ends: Tensor, experts: int, device: torch.device) -> None:
    if ends.dtype != torch.int32 or ends.ndim != 1:
        raise ValueError(f"ends must be int32 [experts]; got {ends.dtype} {tuple(ends.shape)}")
    if len(ends) != experts:
        raise ValueError(f"ends names {len(ends)} groups, the weights hold {experts} experts")
    if ends.device != device:
        raise ValueError(f"ends is on {ends.device}, the operands on {device}")
    if not ends.is_contiguous():
        raise ValueError("ends must be contiguous")


def _choose(impl: Implementation | None, a: Tensor, b: Tensor) -> Implementation:
    """Take torch's grouped GEMM where it runs: bfloat16 (any dtype on a CPU) with strides of whole 16 bytes."""
    if impl is not None:
        return impl
    if a.device.type == "cpu":
        return "torch"
    rows_aligned = all(_is_aligned(t) for t in (a, b))
    has_wgmma = not torch.version.hip and torch.cuda.get_device_capability(a.device)[0] >= 9
    return "torch" if rows_aligned and has_wgmma and a.dtype == torch.bfloat16 else "triton"


def _is_aligned(t: Tensor) -> bool:
    inner, outer = sorted(t.stride()[-2:])
    return inner == 1 and outer * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0


def _check_plain(a: Tensor, b: Tensor, impl: Implementation) -> None:
    if a.dtype != b.dtype or a.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"operands are {a.dtype} and {b.dtype}; expected both torch.float32 or both torch.bfloat16")
    if impl == "triton":
        check_device(a, b)
    elif a.device != b.device:
        raise ValueError(f"operands are on different devices: {a.device}, {b.device}")


def _zero_tail(y: Tensor, ends: Tensor) -> None:
    """Write zeros behind the last group, where torch's grouped GEMM leaves what the memory held."""
    if y.device.type == "cpu" and not INTERPRETED:
        y[int(ends[-1]) :] = 0
        return
    rows, cols = y.shape
    grid = (triton.cdiv(rows, 32), triton.cdiv(cols, 1024))
    zero_tail_kernel[grid](y, ends, rows, cols, len(ends), y.stride(0), y.stride(1), BR=32, BC=1024)


def grouped_matmul(
    a: Tensor | MXFP4Tensor,
    b: Tensor | MXFP4Tensor,
    ends: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    impl: Implementation | None = None,
    native: bool | None = None,
    tile: GemmTile | None = None,
) -> Tensor:
    """Multiply the rows of each group with its own matrix: y[rows of e] = A[rows of e]·B[e]. fprop and dgrad.

    Args:
        a: [R, K], both operands plain (float32 or bfloat16) or both packed along K.
        b: [E, K, N].
        ends: int32 [E], multiples of 32, not decreasing, at most R.
        out_dtype: of the result; default the plain operands' dtype, bfloat16 for packed ones.
        impl: for plain operands, torch's grouped GEMM or the Triton kernel; None picks.
        native: for packed operands, use the scaled matrix units; None asks the device.
        tile: program shape of the Triton kernel.

    Returns:
        [R, N]; rows behind the last group are zero.

    Raises:
        ValueError: for shapes, groups, axes or devices that do not match.
        TypeError: for dtypes that do not.
    """
    if len(a.shape) != 2 or len(b.shape) != 3 or a.shape[1] != b.shape[1]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}; expected [R, K] and [E, K, N]")
    (rows, k), (experts, _, n) = a.shape, b.shape
    left, right, factor, dtype, impl = _operands(a, b, out_dtype, impl)
    _check_ends(ends, experts, left.values.device)
    if rows == 0 or n == 0 or k == 0:
        return torch.zeros(rows, n, dtype=dtype, device=left.values.device)
    if impl == "torch":
        y = F.grouped_mm(left.values, right.values, offs=ends).to(dtype)
        _zero_tail(y, ends)
        return y
    y = torch.empty(rows, n, dtype=dtype, device=left.values.device)
    native = _native(native, left)
    tile = tile or GemmTile.default(native=native)
    # Each group can end in one tile that is not full, and so can the tail.
    grid = ((triton.cdiv(rows, tile.bm) + experts) * triton.cdiv(n, tile.bn),)
    launch(
        left,
        right,
        y,
        m=rows,
        n=n,
        k=k,
        grid=grid,
        tile=tile,
        native=native,
        factor=factor,
        ends=ends,
        grouped=1,
    )
    return y


def grouped_wgrad(
    a: Tensor | MXFP4Tensor,
    b: Tensor | MXFP4Tensor,
    ends: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    impl: Implementation | None = None,
    native: bool | None = None,
    tile: GemmTile | None = None,
) -> Tensor:
    """Sum over each group's own rows: dw[e] = A[:, rows of e]·B[rows of e]; zeros for an empty group.

    Args:
        a: [N, R], plain or packed along R (``transpose`` of dy quantised along axis -2).
        b: [R, K], likewise.
        ends, out_dtype, impl, native, tile: as for :func:`grouped_matmul`.

    Returns:
        [E, N, K]. Rows behind the last group do not count.

    Raises:
        ValueError, TypeError: as :func:`grouped_matmul`.
    """
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}; expected [N, R] and [R, K]")
    (n, rows), k, experts = a.shape, b.shape[1], len(ends)
    left, right, factor, dtype, impl = _operands(a, b, out_dtype, impl)
    _check_ends(ends, experts, left.values.device)
    if rows == 0 or n == 0 or k == 0:
        return torch.zeros(experts, n, k, dtype=dtype, device=left.values.device)
    if impl == "torch":
        dw = F.grouped_mm(left.values, right.values, offs=ends).to(dtype)
        if dw.device.type == "cuda" and torch.cuda.get_device_capability(dw.device)[0] != 9:
            # torch leaves garbage for empty groups on sm_100 (pytorch issue 172439); Hopper writes zeros.
            empty = ends.diff(prepend=ends.new_zeros(1)) == 0
            dw.masked_fill_(empty[:, None, None], 0.0)
        return dw
    dw = torch.empty(experts, n, k, dtype=dtype, device=left.values.device)
    native = _native(native, left)
    tile = tile or GemmTile.default(native=native)
    grid = (triton.cdiv(n, tile.bm) * triton.cdiv(k, tile.bn), experts)
    launch(
        left,
        right,
        dw,
        m=n,
        n=k,
        k=rows,
        grid=grid,
        tile=tile,
        native=native,
        factor=factor,
        ends=ends,
        grouped=2,
    )
    return dw


def _native(native: bool | None, left: Operand) -> bool:
    if left.scales is None:
        return False
    return has_mx_units(left.values.device) if native is None else native


def _operands(
    a: Tensor | MXFP4Tensor, b: Tensor | MXFP4Tensor, out_dtype: torch.dtype | None, impl: Implementation | None
) -> tuple[Operand, Operand, float, torch.dtype, Implementation]:
    """Return both operands, the factor of static clip, the output dtype and the implementation, all checked."""
    if isinstance(a, MXFP4Tensor) and isinstance(b, MXFP4Tensor):
        if impl == "torch":
            raise ValueError("torch has no grouped GEMM for packed MXFP4; leave impl out or dequantise first")
        dtype = out_dtype or torch.bfloat16
        check_out_dtype(dtype)
        check_device(a.codes, a.scales, b.codes, b.scales)
        return packed_operand(a, axis=-1), packed_operand(b, axis=-2), alpha(a, b), dtype, "triton"
    if isinstance(a, MXFP4Tensor) or isinstance(b, MXFP4Tensor):
        raise TypeError("one operand is packed and the other plain; quantise or dequantise one of them")
    chosen = _choose(impl, a, b)
    _check_plain(a, b, chosen)
    dtype = out_dtype or a.dtype
    check_out_dtype(dtype)
    return plain_operand(a, axis=-1), plain_operand(b, axis=-2), 1.0, dtype, chosen
