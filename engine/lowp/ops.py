"""The low-precision Linear as custom operators, so that torch.compile traces it and a CUDA graph can hold it.

``lptctl::linear`` is fprop and prepares what backward needs; ``lptctl::linear_backward`` is dgrad and wgrad. Both are
functional. Everything that changes from step to step is a tensor (noise keys, transform); everything else is in strings
and integers, so a trace is never stale. Outside of a trace :func:`apply_linear` calls the same functions without the
operators, whose dispatch takes longer than a small layer. Legend: M tokens, K in_features, N out_features; x_MK, w_NK,
y_MN, dy_MN.

What backward needs travels as two pairs of tensors, one for x and one for w: values and nothing, or packed codes and
scales, or nothing and nothing where the input itself is saved; :class:`Plan` says which.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from engine.formats import BLOCK_SIZE, OperandOptions
from engine.lowp.operands import Operand, Quantiser, Saved, flat, flip, matmul, plan_of, rebuilt


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


def _forward(
    x_MK: Tensor,
    w_NK: Tensor,
    keys: Tensor,
    permutation: Tensor,
    signs: Tensor,
    layer: str,
    scheme: str,
    row_offset: int,
    training: bool,
    save_packed: bool,
    packed_gemm: bool,
) -> tuple[Tensor, Operand | None, Operand | None, Tensor]:
    """Return y, what to save of x and of w (None: nothing, or the input itself), and the non-finite blocks."""
    plan = plan_of(scheme, save_packed, packed_gemm)
    s = plan.scheme
    make = Quantiser(x_MK, keys, permutation, signs, row_offset)
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
    y_MN = matmul(x, flip(w), x_MK.dtype)
    if training and s.quantised["fprop"]:
        GemmCounter.add(layer, "fprop")
    w_saved = w if training and plan.w_saved != "input" else None
    return y_MN, x_saved, w_saved, make.count


def _backward(
    dy_MN: Tensor,
    x_saved: tuple[Tensor, Tensor | None],
    w_saved: tuple[Tensor, Tensor | None],
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
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return dx, dw (None if not needed) and the non-finite blocks of forward (``count``) and backward, float64."""
    plan = plan_of(scheme, save_packed, packed_gemm)
    s, dtype = plan.scheme, dy_MN.dtype
    make = Quantiser(dy_MN, keys, permutation, signs, row_offset)
    left, right = s.dgrad_dy if needs_dx else None, s.wgrad_dy if needs_dw else None
    names, packed = ("dgrad_dy", "wgrad_dy"), (plan.dgrad_packed, plan.wgrad_packed)
    dgrad_dy, wgrad_dy = make.two(dy_MN, left, right, names, packed=packed)
    dx_MK = dw_NK = None
    if needs_dx:
        w = rebuilt(*w_saved, plan.w_saved, plan.w_options)
        if plan.w_saved == "input" and not s.backward_on_fprop_operands:
            w = make.one(w_saved[0], s.dgrad_w, "dgrad_w", packed=plan.dgrad_packed)
        dx_MK = matmul(dgrad_dy, w, dtype)
        if s.quantised["dgrad"]:
            GemmCounter.add(layer, "dgrad")
    if needs_dw:
        x = rebuilt(*x_saved, plan.x_saved, plan.x_options)
        dw_NK = matmul(flip(wgrad_dy), x, dtype)
        if s.quantised["wgrad"]:
            GemmCounter.add(layer, "wgrad")
    return dx_MK, dw_NK, (make.count + count).to(torch.float64)


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
        scheme: text of a :class:`engine.lowp.scheme.LinearScheme`.
        row_offset: index of the first row in the global micro-batch.
        training: prepare for backward, and count.
        save_packed: keep wgrad's x as packed codes and scales between forward and backward.
        packed_gemm: multiply packed operands where both are quantised.

    Returns:
        y, x's and w's saved pairs (see the module; an empty tensor is nothing), and the number of non-finite blocks of
        forward, int64.
    """
    y_MN, *saved, count = _forward(
        x_MK, w_NK, keys, permutation, signs, layer, scheme, row_offset, training, save_packed, packed_gemm
    )
    x_first, x_scales, w_first, w_scales = (
        x_MK.new_empty(0) if tensor is None else tensor for operand in saved for tensor in flat(operand)
    )
    return y_MN, x_first, x_scales, w_first, w_scales, count


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

    ``x_values`` .. ``w_scales`` are the saved pairs, or the inputs where the plan says so; ``count`` is forward's.
    """
    constants = (layer, scheme, row_offset, needs_dx, needs_dw, save_packed, packed_gemm)
    step = (keys, permutation, signs)
    dx_MK, dw_NK, nonfinite = _backward(dy_MN, (x_values, x_scales), (w_values, w_scales), count, *step, *constants)
    nothing = dy_MN.new_empty(0)
    return nothing if dx_MK is None else dx_MK, dy_MN.new_empty(0) if dw_NK is None else dw_NK, nonfinite


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


def _remember(ctx: Any, inputs: tuple[Any, ...], saved: tuple[Tensor | None, ...], count: Tensor) -> None:
    """Keep for backward what the plan says, inputs included."""
    x_MK, w_NK, _, keys, permutation, signs, layer, scheme, row_offset, training, save_packed, packed_gemm = inputs
    if not training:
        raise RuntimeError("lptctl::linear was called with training=False where a gradient is needed")
    x_first, x_scales, w_first, w_scales = saved
    plan = plan_of(scheme, save_packed, packed_gemm)
    x_first = x_MK if plan.x_saved == "input" else x_first
    w_first = w_NK if plan.w_saved == "input" else w_first
    ctx.save_for_backward(x_first, x_scales, w_first, w_scales, count, keys, permutation, signs)
    ctx.constants = (layer, scheme, row_offset)
    ctx.options = (save_packed, packed_gemm)
    ctx.set_materialize_grads(False)


_NOTHING = (None,) * 9
"""Gradients of the inputs behind ``tally``."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    _remember(ctx, inputs, output[1:5], output[5])


def _differentiate(ctx: Any, dy_MN: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dy_MN is None:
        return None, None, None, *_NOTHING
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    dx_MK, dw_NK, nonfinite = linear_backward(
        dy_MN, *ctx.saved_tensors, *ctx.constants, needs_dx, needs_dw, *ctx.options
    )
    return dx_MK if needs_dx else None, dw_NK if needs_dw else None, nonfinite, *_NOTHING


linear.register_autograd(_differentiate, setup_context=_setup_context)


class _Untraced(torch.autograd.Function):
    """The operators' autograd without the operators."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        y_MN, x_saved, w_saved, count = _forward(*inputs[:2], *inputs[3:])
        _remember(ctx, inputs, (*flat(x_saved), *flat(w_saved)), count)
        return y_MN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (dy_MN,) = grads
        if dy_MN is None:
            return None, None, None, *_NOTHING
        x_first, x_scales, w_first, w_scales, *tensors = ctx.saved_tensors
        constants = (*ctx.constants, *ctx.needs_input_grad[:2], *ctx.options)
        return *_backward(dy_MN, (x_first, x_scales), (w_first, w_scales), *tensors, *constants), *_NOTHING


def apply_linear(
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
) -> Tensor:
    """Return y_MN of :func:`linear`, through the operator in a trace and directly on ordinary tensors."""
    step = (keys, permutation, signs)
    constants = (layer, scheme, row_offset, training, save_packed, packed_gemm)
    if torch.compiler.is_compiling() or type(x_MK) is not Tensor or x_MK.device.type == "meta":
        return linear(x_MK, w_NK, tally, *step, *constants)[0]
    if training:
        return _Untraced.apply(x_MK, w_NK, tally, *step, *constants)
    return _forward(x_MK, w_NK, *step, *constants)[0]
