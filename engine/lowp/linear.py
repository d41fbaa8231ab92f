"""The low-precision Linear layer: three GEMMs, each with the operands its scheme names.

Legend: M tokens, K in_features, N out_features; x_MK, w_NK, y_MN, dy_MN. Operands are quantised and dequantised (QDQ)
to the compute dtype and multiplied there: every E2M1·2^k value is exact in bfloat16 and float32, so the product is what
MXFP4 hardware with fp32 accumulation would compute, up to the order of the sums.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from engine.formats import Hadamard, OperandOptions, combine_keys, make_hadamard, operand_key, step_key
from engine.kernels.cpu import qdq
from engine.lowp.scheme import LinearScheme


class LowpState:
    """What all low-precision layers of a model share: the step's random keys and transform, and counters."""

    def __init__(self, hadamard: str = "none") -> None:
        self.hadamard = hadamard
        """Kind of the wgrad transform."""
        self.step_key = 0
        """64-bit key of (seed, step, micro-batch) for stochastic rounding."""
        self.transform: Hadamard | None = None
        """The step's Hadamard, one for all layers, the same in forward and backward."""
        self.row_offset = 0
        """Index of this rank's first token row in the global micro-batch."""
        self.gemms: dict[str, dict[str, int]] = defaultdict(lambda: {"fprop": 0, "dgrad": 0, "wgrad": 0})
        """Training GEMMs that ran with a quantised operand, per layer."""
        self._nonfinite: list[Tensor] = []
        self._transform_of: tuple[int, int] | None = None
        self.set_step(0, 0, 0)

    def set_step(self, seed: int, step: int, micro_batch: int) -> None:
        """Prepare the micro-batch that comes next: key its stochastic rounding, draw the step's Hadamard."""
        self.step_key = step_key(seed, step, micro_batch)
        if self.hadamard != "none" and self._transform_of != (seed, step):
            self.transform = make_hadamard(self.hadamard, seed=seed, step=step)
            self._transform_of = (seed, step)

    def add_nonfinite(self, count: Tensor) -> None:
        """Remember the number of non-finite blocks of one operand (0-dim int64, not synchronised)."""
        self._nonfinite.append(count)

    def take_nonfinite(self) -> int:
        """Return and reset the number of non-finite blocks since the last call; synchronises with the device."""
        total = int(torch.stack(self._nonfinite).sum().item()) if self._nonfinite else 0
        self._nonfinite.clear()
        return total


class LowpLinear(nn.Linear):
    """A Linear whose GEMM operands go through a :class:`LinearScheme`.

    It takes over the Parameter objects of the layer it replaces, so optimizers, checkpoints and names do not notice.
    The gradient is with respect to the high-precision weight (straight-through); the bias is added unquantised.
    """

    def __init__(self, linear: nn.Linear, *, fqn: str, scheme: LinearScheme, state: LowpState) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.fqn = fqn
        self.scheme = scheme
        self.state = state
        self.operand_keys = {name: operand_key(fqn, name) for name in ("dgrad_dy", "wgrad_dy")}

    def extra_repr(self) -> str:
        """Show the shape and which GEMMs are quantised."""
        on = [name for name, is_on in self.scheme.quantised.items() if is_on]
        return f"{super().extra_repr()}, quantised={'+'.join(on) or 'none'}"

    def forward(self, x: Tensor) -> Tensor:
        """Return x·wᵀ + bias for x [..., K] in the compute dtype; the result is [..., N]."""
        w_NK = self.weight.to(x.dtype)
        x_MK = x.reshape(-1, self.in_features)
        if torch.is_grad_enabled():
            y_MN = _ThreeGemms.apply(x_MK, w_NK, self)
        else:
            y_MN = _fprop(x_MK, w_NK, self.scheme)[0]
        y = y_MN.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def _fprop(x_MK: Tensor, w_NK: Tensor, scheme: LinearScheme) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return y_MN, the two operands it was made of, and the operands' non-finite block counts."""
    counts: list[Tensor] = []

    def through(value: Tensor, options: OperandOptions | None) -> Tensor:
        if options is None:
            return value
        out, nonfinite = qdq(value, options)
        counts.append(nonfinite)
        return out

    xq_MK, wq_NK = through(x_MK, scheme.fprop_x), through(w_NK, scheme.fprop_w)
    return xq_MK @ wq_NK.t(), xq_MK, wq_NK, counts


class _ThreeGemms(torch.autograd.Function):
    """fprop in forward, dgrad and wgrad in backward."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, layer: LowpLinear) -> Tensor:
        scheme, state = layer.scheme, layer.state
        y_MN, xq_MK, wq_NK, counts = _fprop(x_MK, w_NK, scheme)
        for count in counts:
            state.add_nonfinite(count)
        if scheme.quantised["fprop"]:
            state.gemms[layer.fqn]["fprop"] += 1
        ctx.layer = layer
        # Backward belongs to this micro-batch even if the state moves on before it runs.
        ctx.step_key, ctx.row_offset, ctx.transform = state.step_key, state.row_offset, state.transform
        if scheme.backward_on_fprop_operands:
            wgrad_x = xq_MK
        elif scheme.wgrad_x is not None:
            wgrad_x, count = qdq(x_MK, scheme.wgrad_x, transform=_transform(scheme.wgrad_x, state.transform))
            state.add_nonfinite(count)
        else:
            wgrad_x = x_MK
        dgrad_w = wq_NK if scheme.dgrad_reuses_fprop_w or scheme.backward_on_fprop_operands else w_NK
        ctx.save_for_backward(wgrad_x, dgrad_w)
        return y_MN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (dy_MN,) = grads
        layer: LowpLinear = ctx.layer
        scheme, state = layer.scheme, layer.state
        x_MK, w_NK = ctx.saved_tensors
        dx_MK = dw_NK = None

        def gradient(name: str, options: OperandOptions | None) -> Tensor:
            if options is None:
                return dy_MN
            key = combine_keys(ctx.step_key, layer.operand_keys[name]) if options.rounding == "sr" else None
            out, count = qdq(
                dy_MN,
                options,
                key=key,
                transform=_transform(options, ctx.transform),
                row_offset=ctx.row_offset,
            )
            state.add_nonfinite(count)
            return out

        if ctx.needs_input_grad[0]:
            if scheme.dgrad_w is not None and not scheme.dgrad_reuses_fprop_w:
                w_NK, count = qdq(w_NK, scheme.dgrad_w)
                state.add_nonfinite(count)
            dx_MK = gradient("dgrad_dy", scheme.dgrad_dy) @ w_NK
            if scheme.quantised["dgrad"]:
                state.gemms[layer.fqn]["dgrad"] += 1
        if ctx.needs_input_grad[1]:
            dw_NK = gradient("wgrad_dy", scheme.wgrad_dy).t() @ x_MK
            if scheme.quantised["wgrad"]:
                state.gemms[layer.fqn]["wgrad"] += 1
        return dx_MK, dw_NK, None


def _transform(options: OperandOptions, transform: Hadamard | None) -> Hadamard | None:
    return transform if options.hadamard != "none" else None
