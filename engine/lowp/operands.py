"""Operands of a low-precision Linear: which form each takes, how it is made, multiplied and kept for backward."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.formats import Hadamard, MXFP4Tensor, OperandOptions
from engine.formats.e8m0 import NAN_CODE
from engine.kernels import DeviceHadamard, cpu, dequantise, kernel_path, qdq, qdq_two, quantise, quantise_two
from engine.kernels.hadamard import key_number
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


_host_transform: tuple[Tensor, Tensor, int, int, Hadamard] | None = None


def _on_host(transform: DeviceHadamard) -> Hadamard:
    """Return a CPU transform's numbers, read once for all layers of a step."""
    global _host_transform
    permutation, signs = transform.permutation, transform.signs
    versions = (permutation._version, signs._version)
    cached = _host_transform
    # The cached tensors are held, so no other tensor can have their identity.
    if cached is not None and cached[0] is permutation and cached[1] is signs and cached[2:4] == versions:
        return cached[4]
    found = transform.to_transform()
    _host_transform = (permutation, signs, *versions, found)
    return found


class Quantiser:
    """Makes the operands of one forward or backward and counts their non-finite blocks."""

    def __init__(self, like: Tensor, keys: Tensor, permutation: Tensor, signs: Tensor, row_offset: int) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=like.device)
        """Number of non-finite blocks so far, int64."""
        self._keys = {"dgrad_dy": keys[0:1], "wgrad_dy": keys[1:2]}
        self._permutation, self._signs = permutation, signs
        self._row_offset = row_offset
        self._on_cpu = like.device.type == "cpu"
        self._compiled = self._on_cpu and kernel_path(like.device).path == "compiled"

    def _draw(self, options: OperandOptions, name: str) -> dict[str, Any]:
        """Return the key and transform of an operand: tensors on a GPU, where nothing may wait, numbers on a CPU."""
        key: Tensor | int | None = self._keys[name] if options.rounding == "sr" else None
        transform: DeviceHadamard | Hadamard | None = None
        if options.hadamard != "none":
            transform = DeviceHadamard(kind=options.hadamard, permutation=self._permutation, signs=self._signs)
        if self._on_cpu:
            key = key_number(key) if isinstance(key, Tensor) else None
            transform = _on_host(transform) if isinstance(transform, DeviceHadamard) else None
        return {"key": key, "transform": transform}

    def _counted(self, q: MXFP4Tensor) -> MXFP4Tensor:
        self.count += (q.scales == NAN_CODE).sum()
        return q

    def one(self, x: Tensor, options: OperandOptions | None, name: str, *, packed: bool) -> Operand:
        """Return x through ``options``, QDQ'd or packed; x itself for None."""
        if options is None:
            return x
        offset = self._row_offset if options.rounding == "sr" else 0
        draw = self._draw(options, name)
        if packed:
            return self._counted(quantise(x, options, row_offset=offset, **draw))
        if self._compiled:
            values, count = cpu.qdq(x, options, row_offset=offset, **draw)
            self.count += count
            return values
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
        one_pass = not self._on_cpu and packed[0] == packed[1]
        if rows is None or columns is None or not one_pass or rows.block != "1d" or columns.block != "1d":
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
            by_rows, by_columns = quantise_two(x, rows, columns, row_offset=self._row_offset, **draws)
            return self._counted(by_rows), self._counted(by_columns)
        left, right, _ = qdq_two(x, rows, columns, row_offset=self._row_offset, counter=self.count, **draws)
        return left, right


def values(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand's values, dequantised to ``dtype`` if packed."""
    return dequantise(operand, dtype) if isinstance(operand, MXFP4Tensor) else operand


def flip(operand: Operand) -> Operand:
    """Return the transpose of a matrix, as a view."""
    if isinstance(operand, Tensor):
        return operand.t()
    from engine.kernels.gemm import transpose

    return transpose(operand)


def matmul(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Return A·B in ``dtype``: packed by packed where both are, else on dequantised values."""
    if isinstance(a, MXFP4Tensor) and isinstance(b, MXFP4Tensor):
        from engine.kernels.gemm import packed_matmul, repack

        return packed_matmul(a, b if b.axis == 0 else repack(b, 0), out_dtype=dtype)
    return values(a, dtype) @ values(b, dtype)


def flat(operand: Operand | None) -> tuple[Tensor | None, Tensor | None]:
    """Return an operand as a pair of tensors: values and nothing, or codes and scales."""
    if isinstance(operand, MXFP4Tensor):
        return operand.codes, operand.scales
    return operand, None


def rebuilt(first: Tensor, scales: Tensor | None, saved: Saved, options: OperandOptions | None) -> Operand:
    """Undo :func:`flat` for a matrix that was saved in a form."""
    if saved != "packed" or options is None or scales is None:
        return first
    axis = options.axis % 2
    shape = list(first.shape)
    shape[axis] *= 2
    return MXFP4Tensor(
        codes=first, scales=scales, axis=axis, block=options.block, shape=torch.Size(shape), clip=options.clip
    )
