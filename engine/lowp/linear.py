"""The low-precision Linear layer: three GEMMs, each with the operands its scheme names.

Legend: M tokens, K in_features, N out_features; x_MK, w_NK, y_MN. Operands are quantised and dequantised (QDQ) to the
compute dtype and multiplied there: every E2M1·2^k value is exact in bfloat16 and float32, so the product is what MXFP4
hardware with fp32 accumulation would compute, up to the order of the sums. Where the device multiplies MXFP4 natively,
the operands stay packed.

The work is in the operators of :mod:`engine.lowp.ops`. What changes from step to step is in tensors that
:class:`LowpState` changes in place, so a compiled or captured step needs no retracing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from engine.formats import make_hadamard, operand_key, step_key
from engine.formats.options import HadamardKind
from engine.kernels import DeviceHadamard, combine_key_tensors, kernel_path
from engine.kernels.hadamard import signed64
from engine.kernels.mx_units import has_mx_units
from engine.lowp.ops import GemmCounter, apply_linear
from engine.lowp.scheme import LinearScheme

_SR_OPERANDS = ("dgrad_dy", "wgrad_dy")


@dataclass(frozen=True, kw_only=True, slots=True)
class LowpOptions:
    """How low-precision layers compute; unlike a scheme it changes no operand's value."""

    save_packed: bool = False
    """Keep wgrad's x between forward and backward as packed MXFP4 (4.25 bits a value) instead of QDQ values."""
    gemm: Literal["auto", "qdq", "packed"] = "auto"
    """``qdq`` multiplies dequantised values, ``packed`` the packed operands; ``auto`` packs where the device multiplies
    MXFP4 natively. They differ in the order of the sums."""

    def packs(self, device: torch.device) -> bool:
        """Tell whether GEMMs on a device take packed operands."""
        if self.gemm == "auto":
            return has_mx_units(device) and kernel_path(device).uses_kernels
        return self.gemm == "packed"


class LowpState:
    """What all low-precision layers of a model share: the step's noise keys and transform, and counters.

    Forward saves the tensors for backward, so :meth:`set_step` between a forward and its backward makes autograd raise.
    """

    def __init__(self, hadamard: HadamardKind = "none", *, device: torch.device | str = "cpu") -> None:
        self.hadamard = hadamard
        """Kind of the wgrad transform."""
        self.row_offset = 0
        """Index of this rank's first token row in the global micro-batch."""
        self.counter = GemmCounter()
        """Training GEMMs that ran with a quantised operand."""
        self.step_key = torch.zeros(1, dtype=torch.int64, device=device)
        """Key of (seed, step, micro-batch) for stochastic rounding, 64 bits in an int64."""
        self.operand_keys = torch.zeros(0, dtype=torch.int64, device=device)
        """Keys of each layer's two gradient operands, constants of the model."""
        self.keys = torch.zeros(0, dtype=torch.int64, device=device)
        """Both combined: the keys that the operators take."""
        stages = {"none": 0, "3rht": 3}.get(hadamard, 1)
        self.permutation = torch.zeros(stages, 32, dtype=torch.int32, device=device)
        """The step's Hadamard, one for all layers, the same in forward and backward."""
        self.signs = torch.zeros(stages, 32, dtype=torch.float32, device=device)
        """Its signs."""
        self.tally = torch.zeros((), dtype=torch.float64, device=device)
        """Its gradient counts the non-finite blocks of every step that ran backward: a count made in backward has no
        other way out of a functional graph."""
        self._reset_tally()
        self._step: tuple[int, int, int] = (0, 0, 0)
        self._transform_of: tuple[int, int] | None = None
        self.set_step(*self._step)

    @property
    def gemms(self) -> dict[str, dict[str, int]]:
        """Training GEMMs that ran with a quantised operand, per layer."""
        return self.counter.gemms

    def add_layer(self, fqn: str) -> int:
        """Register a layer's keys; returns the index of the first of its two in ``keys``."""
        first = len(self.operand_keys)
        new = [signed64(operand_key(fqn, name)) for name in _SR_OPERANDS]
        self.operand_keys = torch.cat((self.operand_keys, self.operand_keys.new_tensor(new)))
        self.keys = combine_key_tensors(self.step_key, self.operand_keys)
        return first

    def set_step(self, seed: int, step: int, micro_batch: int) -> None:
        """Prepare the micro-batch that comes next, in place: key its stochastic rounding, draw the step's Hadamard."""
        self._step = (seed, step, micro_batch)
        self.step_key.fill_(signed64(step_key(seed, step, micro_batch)))
        self.keys.copy_(combine_key_tensors(self.step_key, self.operand_keys))
        if self.hadamard != "none" and self._transform_of != (seed, step):
            drawn = DeviceHadamard.from_transform(make_hadamard(self.hadamard, seed=seed, step=step), "cpu")
            self.permutation.copy_(drawn.permutation)
            self.signs.copy_(drawn.signs)
            self._transform_of = (seed, step)

    def to(self, device: torch.device) -> None:
        """Move to a device, unless already there."""
        if self.step_key.device == device:
            return
        for name in ("step_key", "operand_keys", "keys", "permutation", "signs"):
            setattr(self, name, getattr(self, name).to(device))
        self.tally = torch.zeros((), dtype=torch.float64, device=device)
        self._reset_tally()

    def _reset_tally(self) -> None:
        self.tally.requires_grad_().grad = torch.zeros_like(self.tally)

    def take_nonfinite(self) -> int:
        """Return and reset the number of non-finite blocks since the last call; synchronises with the device."""
        gradient = self.tally.grad
        if gradient is None:
            return 0
        total = int(gradient.item())
        gradient.zero_()
        return total


class LowpLinear(nn.Linear):
    """A Linear whose GEMM operands go through a :class:`LinearScheme`.

    It takes over the Parameter objects of the layer it replaces, so optimizers, checkpoints and names do not notice.
    The gradient is with respect to the high-precision weight (straight-through); the bias is added unquantised.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        fqn: str,
        scheme: LinearScheme,
        state: LowpState,
        options: LowpOptions | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.fqn = fqn
        self.scheme = scheme
        self.state = state
        self.options = options or LowpOptions()
        self._scheme_text = scheme.to_text()
        self._layer = state.counter.layer(fqn)
        self._first_key = state.add_layer(fqn)
        self._packed_gemm = self.options.packs(self.weight.device)

    def extra_repr(self) -> str:
        """Show the shape and which GEMMs are quantised."""
        on = [name for name, is_on in self.scheme.quantised.items() if is_on]
        return f"{super().extra_repr()}, quantised={'+'.join(on) or 'none'}"

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Let the shared state and the choice of GEMM follow the weight to another device (``model.to``)."""
        super()._apply(fn, recurse)
        self.state.to(self.weight.device)
        self._packed_gemm = self.options.packs(self.weight.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return x·wᵀ + bias for x [..., K] in the compute dtype; the result is [..., N]."""
        state = self.state
        training = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        y_MN = apply_linear(
            x.reshape(-1, self.in_features),
            self.weight.to(x.dtype),
            state.tally if training else state.tally.detach(),
            state.keys[self._first_key : self._first_key + 2],
            state.permutation,
            state.signs,
            self._layer,
            self._scheme_text,
            state.row_offset,
            training,
            self.options.save_packed,
            self._packed_gemm,
        )
        y = y_MN.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(x.dtype)
