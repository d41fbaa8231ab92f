"""The low-precision Linear as custom operators, so that torch.compile traces it and a CUDA graph can hold it.

``lptctl::linear`` is fprop and prepares what backward needs; ``lptctl::linear_backward`` is dgrad and wgrad. Both are
functional. Everything that changes from step to step is a tensor (noise keys, transform); everything else is in strings
and integers, so a trace is never stale. Legend: M tokens, K in_features, N out_features; x_MK, w_NK, y_MN, dy_MN.

What backward needs travels as two pairs of tensors, one for x and one for w: values and nothing, or packed codes and
scales, or nothing and nothing where the input itself is saved; :class:`Plan` says which.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.formats import BLOCK_SIZE, MXFP4Tensor, OperandOptions
from engine.formats.e8m0 import NAN_CODE
from engine.kernels import DeviceHadamard, dequantise, qdq, qdq_two, quantise, quantise_two
from engine.lowp.scheme import LinearScheme

Saved = Literal["input", "values", "packed"]
Operand = Tensor | MXFP4Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which form every operand of a scheme takes."""

    scheme: LinearScheme
    fprop_packed: bool
    """fprop multiplies packed operands; so do the other two below."""
    dgrad_packed: bool
    wgrad_packed: bool
    x_saved: Saved
    """Form of wgrad's x between forward and backward."""
    x_options: OperandOptions | None
    """What it was quantised with; None for ``input``."""
    w_saved: Saved
    """Form of dgrad's w between forward and backward; ``input`` is the unquantised weight."""
    w_options: OperandOptions | None


@functools.lru_cache(maxsize=256)
def plan_of(scheme: str, save_packed: bool, packed_gemm: bool) -> Plan:
    """Return the plan of a scheme's text and the two engine options."""
    s = LinearScheme.from_text(scheme)
    dgrad_w = s.fprop_w if s.dgrad_reuses_fprop_w else s.dgrad_w
    fprop_packed = packed_gemm and s.fprop_x is not None and s.fprop_w is not None
    dgrad_packed = packed_gemm and s.dgrad_dy is not None and dgrad_w is not None
    wgrad_packed = packed_gemm and s.wgrad_dy is not None and s.wgrad_x is not None
    x_options = s.fprop_x if s.backward_on_fprop_operands else s.wgrad_x
    w_options = s.fprop_w if s.backward_on_fprop_operands or s.dgrad_reuses_fprop_w else None
    x_packed = save_packed or (fprop_packed if s.backward_on_fprop_operands else wgrad_packed)
    x_saved: Saved = "input" if x_options is None else "packed" if x_packed else "values"
    w_saved: Saved = "input" if w_options is None else "packed" if fprop_packed else "values"
    return Plan(
        scheme=s,
        fprop_packed=fprop_packed,
        dgrad_packed=dgrad_packed,
        wgrad_packed=wgrad_packed,
        x_saved=x_saved,
        x_options=x_options,
        w_saved=w_saved,
        w_options=w_options,
    )


class GemmCounter:
    """Counts the training GEMMs that ran with a quantised operand, per layer.

    The operators find it by the handle in their ``layer`` argument. It counts calls from Python: a replayed CUDA graph
    makes none.
    """

    def __init__(self) -> None:
        self.handle = next(_HANDLES)
        self.gemms: dict[str, dict[str, int]] = defaultdict(lambda: {"fprop": 0, "dgrad": 0, "wgrad": 0})
        _ALIVE[self.handle] = self

    def layer(self, fqn: str) -> str:
        """Return the ``layer`` argument of a module path."""
        return f"{self.handle}:{fqn}"

    @staticmethod
    def add(layer: str, gemm: str) -> None:
        """Count one GEMM of a layer, unless its counter is gone."""
        handle, _, fqn = layer.partition(":")
        counter = _ALIVE.get(int(handle))
        if counter is not None:
            counter.gemms[fqn][gemm] += 1


_HANDLES = itertools.count()
_ALIVE: weakref.WeakValueDictionary[int, GemmCounter] = weakref.WeakValueDictionary()


class _Quantiser:
    """Makes the operands of one operator call and counts their non-finite blocks."""

    def __init__(self, like: Tensor, keys: Tensor, permutation: Tensor, signs: Tensor, row_offset: int) -> None:
        self.dtype = like.dtype
        self.count = torch.zeros((), dtype=torch.int64, device=like.device)
        self.keys = {"dgrad_dy": keys[0:1], "wgrad_dy": keys[1:2]}
        self.permutation, self.signs = permutation, signs
        self.row_offset = row_offset

    def _draw(self, options: OperandOptions, name: str) -> dict[str, Any]:
        transform = None
        if options.hadamard != "none":
            transform = DeviceHadamard(kind=options.hadamard, permutation=self.permutation, signs=self.signs)
        return {"key": self.keys[name] if options.rounding == "sr" else None, "transform": transform}

    def _counted(self, q: MXFP4Tensor) -> MXFP4Tensor:
        self.count += (q.scales == NAN_CODE).sum()
        return q

    def one(self, x: Tensor, options: OperandOptions | None, name: str, *, packed: bool) -> Operand:
        """Return x through ``options``, QDQ'd or packed; x itself for None."""
        if options is None:
            return x
        offset = self.row_offset if options.rounding == "sr" else 0
        draw = self._draw(options, name)
        if packed:
            return self._counted(quantise(x, options, row_offset=offset, **draw))
        return qdq(x, options, row_offset=offset, counter=self.count, **draw)[0]

    def two(
        self,
        x: Tensor,
        rows: OperandOptions | None,
        columns: OperandOptions | None,
        names: tuple[str, str],
        *,
        packed: tuple[bool, bool],
    ) -> tuple[Operand, Operand]:
        """Return x through both options, in one pass over x where a kernel can."""
        if rows is None or columns is None or packed[0] != packed[1] or rows.block != "1d" or columns.block != "1d":
            return (
                self.one(x, rows, names[0], packed=packed[0]),
                self.one(x, columns, names[1], packed=packed[1]),
            )
        draws = {
            f"{side}_{what}": value
            for side, options, name in (("rows", rows, names[0]), ("columns", columns, names[1]))
            for what, value in self._draw(options, name).items()
        }
        if packed[0]:
            by_rows, by_columns = quantise_two(x, rows, columns, row_offset=self.row_offset, **draws)
            return self._counted(by_rows), self._counted(by_columns)
        left, right, _ = qdq_two(x, rows, columns, row_offset=self.row_offset, counter=self.count, **draws)
        return left, right


def _values(operand: Operand, dtype: torch.dtype) -> Tensor:
    return dequantise(operand, dtype) if isinstance(operand, MXFP4Tensor) else operand


def _flip(operand: Operand) -> Operand:
    """Return the transpose of a matrix, as a view."""
    if isinstance(operand, Tensor):
        return operand.t()
    from engine.kernels.gemm import transpose

    return transpose(operand)


def _matmul(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Return A·B in ``dtype``: packed by packed where both are, else on dequantised values."""
    if isinstance(a, MXFP4Tensor) and isinstance(b, MXFP4Tensor):
        from engine.kernels.gemm import packed_matmul, repack

        return packed_matmul(a, b if b.axis == 0 else repack(b, 0), out_dtype=dtype)
    return _values(a, dtype) @ _values(b, dtype)


def _flat(operand: Operand | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pair of tensors in which an operand leaves forward."""
    if isinstance(operand, MXFP4Tensor):
        return operand.codes, operand.scales
    nothing = like.new_empty(0)
    return (nothing if operand is None else operand), like.new_empty(0)


def _rebuilt(values: Tensor, scales: Tensor, saved: Saved, options: OperandOptions | None) -> Operand:
    """Undo :func:`_flat`."""
    if saved != "packed" or options is None:
        return values
    axis = options.axis % 2
    shape = list(values.shape)
    shape[axis] *= 2
    return MXFP4Tensor(
        codes=values, scales=scales, axis=axis, block=options.block, shape=torch.Size(shape), clip=options.clip
    )


@torch.library.custom_op("lptctl::linear", mutates_args=())
def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    tally: Tensor,
    keys: Tensor,
    permutation: Tensor,
    signs: Tensor,
    layer: str,
    scheme: str,
    row_offset: int,
    training: bool,
    save_packed: bool,
    packed_gemm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y_MN = x·wᵀ under a scheme, and what backward needs.

    Args:
        x_MK: float32 or bfloat16 [M, K].
        w_NK: [N, K], same dtype.
        tally: float64 scalar that requires a gradient: its gradient is the number of non-finite blocks.
        keys: int64 [2], noise keys of dgrad's and wgrad's dy.
        permutation: int32 [stages, 32] of the Hadamard transform, [0, 32] for none.
        signs: float32, likewise.
        layer: from :meth:`GemmCounter.layer`.
        scheme: text of a :class:`LinearScheme`.
        row_offset: index of the first row in the global micro-batch.
        training: prepare for backward, and count.
        save_packed: keep wgrad's x as packed codes and scales between forward and backward.
        packed_gemm: multiply packed operands where both are quantised.

    Returns:
        y, x's and w's saved pairs (see the module), and the number of non-finite blocks so far, int64.
    """
    plan = plan_of(scheme, save_packed, packed_gemm)
    s = plan.scheme
    make = _Quantiser(x_MK, keys, permutation, signs, row_offset)
    x_saved: Operand | None = None
    if training and plan.x_saved != "input" and not s.backward_on_fprop_operands:
        packed = (plan.fprop_packed, plan.x_saved == "packed")
        x, x_saved = make.two(x_MK, s.fprop_x, s.wgrad_x, ("fprop_x", "wgrad_x"), packed=packed)
    else:
        keeps = training and plan.x_saved == "packed"
        x = make.one(x_MK, s.fprop_x, "fprop_x", packed=plan.fprop_packed or keeps)
        if training and plan.x_saved != "input":
            x_saved = x
    w = make.one(w_NK, s.fprop_w, "fprop_w", packed=plan.fprop_packed)
    y_MN = _matmul(x, _flip(w), x_MK.dtype)
    if training and s.quantised["fprop"]:
        GemmCounter.add(layer, "fprop")
    w_saved = w if training and plan.w_saved != "input" else None
    return y_MN, *_flat(x_saved, x_MK), *_flat(w_saved, w_NK), make.count


@linear.register_fake
def _(
    x_MK: Tensor,
    w_NK: Tensor,
    tally: Tensor,
    keys: Tensor,
    permutation: Tensor,
    signs: Tensor,
    layer: str,
    scheme: str,
    row_offset: int,
    training: bool,
    save_packed: bool,
    packed_gemm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    plan = plan_of(scheme, save_packed, packed_gemm)

    def pair(like: Tensor, saved: Saved, options: OperandOptions | None) -> tuple[Tensor, Tensor]:
        if not training or saved == "input" or options is None:
            return like.new_empty(0), like.new_empty(0)
        if saved == "values":
            return like.new_empty(like.shape), like.new_empty(0)
        codes, scales = list(like.shape), list(like.shape)
        codes[options.axis] //= 2
        for axis in (0, 1) if options.block == "2d" else (options.axis,):
            scales[axis] //= BLOCK_SIZE
        return like.new_empty(codes, dtype=torch.uint8), like.new_empty(scales, dtype=torch.uint8)

    y_MN = x_MK.new_empty(x_MK.shape[0], w_NK.shape[0])
    count = torch.empty((), dtype=torch.int64, device=x_MK.device)
    return (
        y_MN,
        *pair(x_MK, plan.x_saved, plan.x_options),
        *pair(w_NK, plan.w_saved, plan.w_options),
        count,
    )


@torch.library.custom_op("lptctl::linear_backward", mutates_args=())
def linear_backward(
    dy_MN: Tensor,
    x_values: Tensor,
    x_scales: Tensor,
    w_values: Tensor,
    w_scales: Tensor,
    count: Tensor,
    keys: Tensor,
    permutation: Tensor,
    signs: Tensor,
    layer: str,
    scheme: str,
    row_offset: int,
    needs_dx: bool,
    needs_dw: bool,
    save_packed: bool,
    packed_gemm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx_MK, dw_NK (each empty if not needed) and the number of non-finite blocks of the whole step, float64.

    ``x_values`` .. ``w_scales`` are the saved pairs, or forward's inputs where the plan says so; ``count`` is forward's
    own.
    """
    plan = plan_of(scheme, save_packed, packed_gemm)
    s, dtype = plan.scheme, dy_MN.dtype
    make = _Quantiser(dy_MN, keys, permutation, signs, row_offset)
    left, right = s.dgrad_dy if needs_dx else None, s.wgrad_dy if needs_dw else None
    names, packed = ("dgrad_dy", "wgrad_dy"), (plan.dgrad_packed, plan.wgrad_packed)
    dgrad_dy, wgrad_dy = make.two(dy_MN, left, right, names, packed=packed)
    dx_MK, dw_NK = dy_MN.new_empty(0), dy_MN.new_empty(0)
    if needs_dx:
        w = _rebuilt(w_values, w_scales, plan.w_saved, plan.w_options)
        if plan.w_saved == "input" and not s.backward_on_fprop_operands:
            w = make.one(w_values, s.dgrad_w, "dgrad_w", packed=plan.dgrad_packed)
        dx_MK = _matmul(dgrad_dy, w, dtype)
        if s.quantised["dgrad"]:
            GemmCounter.add(layer, "dgrad")
    if needs_dw:
        x = _rebuilt(x_values, x_scales, plan.x_saved, plan.x_options)
        dw_NK = _matmul(_flip(wgrad_dy), x, dtype)
        if s.quantised["wgrad"]:
            GemmCounter.add(layer, "wgrad")
    return dx_MK, dw_NK, (make.count + count).to(torch.float64)


@linear_backward.register_fake
def _(
    dy_MN: Tensor,
    x_values: Tensor,
    x_scales: Tensor,
    w_values: Tensor,
    w_scales: Tensor,
    count: Tensor,
    keys: Tensor,
    permutation: Tensor,
    signs: Tensor,
    layer: str,
    scheme: str,
    row_offset: int,
    needs_dx: bool,
    needs_dw: bool,
    save_packed: bool,
    packed_gemm: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = plan_of(scheme, save_packed, packed_gemm)
    (m, n), k = dy_MN.shape, x_values.shape[1]
    if plan.x_saved == "packed" and plan.x_options is not None and plan.x_options.axis in (-1, 1):
        k = 2 * k
    return (
        dy_MN.new_empty(m, k) if needs_dx else dy_MN.new_empty(0),
        dy_MN.new_empty(n, k) if needs_dw else dy_MN.new_empty(0),
        torch.empty((), dtype=torch.float64, device=dy_MN.device),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_MK, w_NK, _, keys, permutation, signs, layer, scheme, row_offset, training, save_packed, packed_gemm = inputs
    _, x_values, x_scales, w_values, w_scales, count = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    if not training:
        raise RuntimeError("lptctl::linear was called with training=False where a gradient is needed")
    plan = plan_of(scheme, save_packed, packed_gemm)
    x_values = x_MK if plan.x_saved == "input" else x_values
    w_values = w_NK if plan.w_saved == "input" else w_values
    ctx.save_for_backward(x_values, x_scales, w_values, w_scales, count, keys, permutation, signs)
    ctx.constants = (layer, scheme, row_offset)
    ctx.options = (save_packed, packed_gemm)


def _backward(ctx: Any, dy_MN: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 9
    if dy_MN is None:
        return None, None, None, *nothing
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    dx_MK, dw_NK, nonfinite = linear_backward(
        dy_MN, *ctx.saved_tensors, *ctx.constants, needs_dx, needs_dw, *ctx.options
    )
    return dx_MK if needs_dx else None, dw_NK if needs_dw else None, nonfinite, *nothing


linear.register_autograd(_backward, setup_context=_setup_context)
