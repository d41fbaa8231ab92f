"""Small cases of every kernel against the reference, on the device at hand: the probe's evidence. Imports Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.formats import OperandOptions, e8m0, make_hadamard, mxfp4
from engine.kernels import launch
from engine.kernels.hadamard import key_tensor, on_device
from engine.kernels.operand import Operand

_KEY = 0x0123456789ABCDEF
_OPTIONS = {
    "rows": OperandOptions(),
    "rows with stochastic rounding": OperandOptions(rounding="sr"),
    "rows with Hadamard": OperandOptions(hadamard="random"),
    "columns": OperandOptions(axis=-2),
    "columns with Hadamard and stochastic rounding": OperandOptions(axis=-2, rounding="sr", hadamard="random"),
    "tiles": OperandOptions(block="2d"),
}
CASES = 2 * len(_OPTIONS)
"""Number of cases: each dequantised at once, and packed and dequantised."""


def sample(device: torch.device) -> Tensor:
    """Return bfloat16 [64, 64] whose magnitudes run from subnormals to the largest, with zeros, an Inf and a NaN."""
    bits = torch.arange(64 * 64, dtype=torch.int32) * 40503 % 65536
    x = bits.to(torch.uint16).view(torch.bfloat16).view(64, 64).clone()
    x[~x.isfinite()] = 0
    x[5] = x[5] * 0
    x[:, 40] *= 2.0**-120
    x[20, 33], x[50, 1] = float("nan"), float("-inf")
    return x.to(device)


def _same(a: Tensor, b: Tensor) -> bool:
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(torch.int32)[~nan], b.view(torch.int32)[~nan])


def differing_cases(device: torch.device) -> list[str]:
    """Return the cases whose bits differ from the reference's, which runs on the CPU."""
    x = sample(torch.device("cpu"))
    on_gpu = x.to(device)
    wrong = []
    for name, options in _OPTIONS.items():
        sr = options.rounding == "sr"
        transform = make_hadamard(options.hadamard, seed=1, step=1) if options.hadamard != "none" else None
        expected, count = mxfp4.qdq(x, options, key=_KEY if sr else None, transform=transform, out_dtype=torch.float32)
        draw = launch.Draw(
            key=key_tensor(_KEY, device) if sr else None,
            transform=on_device(transform, device) if transform else None,
            first=0,
        )
        operand = Operand.of(options, 2)
        values = torch.empty(x.shape, dtype=x.dtype, device=device)
        counted = torch.zeros((), dtype=torch.int64, device=device)
        launch.quantise(on_gpu, operand, draw, values, None, counted).run()
        if not _same(values.cpu().float(), expected.to(x.dtype).float()) or counted.item() != count.item():
            wrong.append(name)
        layout = mxfp4.layout_of(x.shape, options)
        halved = [size // 2 if dim == layout.axis else size for dim, size in enumerate(x.shape)]
        codes = torch.empty(halved, dtype=torch.uint8, device=device)
        scales = torch.empty(layout.scales, dtype=torch.uint8, device=device)
        launch.quantise(on_gpu, operand, draw, codes, scales, None).run()
        values = torch.empty(x.shape, dtype=torch.float32, device=device)
        launch.dequantise(codes, scales, x.shape, operand, values).run()
        if not _same(values.cpu(), expected) or int((scales == e8m0.NAN_CODE).sum()) != count.item():
            wrong.append(name + ", packed")
    return wrong
