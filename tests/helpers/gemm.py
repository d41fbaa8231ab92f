"""Operands and float64 references for the GEMM kernels, the same on a CPU and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.formats import MXFP4Tensor, OperandOptions, dequantise, quantise


def spread(shape: tuple[int, ...], *, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return fp32 values whose magnitudes span 2^-12 .. 2^12, so that the fp32 sums of their products do round."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 13, (*shape[:-1], 1), generator=generator).expand(shape)
    return torch.ldexp(torch.randn(shape, generator=generator), exponents).to(device)


def packed(x: Tensor, axis: int, block: str = "1d", clip: str = "none") -> MXFP4Tensor:
    """Quantise along ``axis``, round to nearest."""
    return quantise(x, OperandOptions(axis=axis, block=block, clip=clip))


def exact(q: MXFP4Tensor) -> Tensor:
    """Return a packed tensor's values in float64."""
    return dequantise(q, torch.float32).double()


def assert_is_product(y: Tensor, a: Tensor, b: Tensor) -> None:
    """Check y = A·B up to the rounding of an fp32 sum in any order, and of y's own dtype.

    A sum of n exact products in fp32 errs by at most n·2^-24·Σ|products| (Higham, Accuracy and Stability, 4.4).
    """
    product, magnitude = a @ b, a.abs() @ b.abs()
    bound = a.shape[-1] * 2.0**-24 * magnitude
    if y.dtype == torch.bfloat16:
        # The interpreter's conversion truncates: a whole unit in the last place, where hardware errs by half of one.
        bound += 2.0**-7 * product.abs()
    error = (y.double() - product).abs()
    assert bool((error <= bound).all()), (
        f"error {error.max():.3g}, {(error / bound).nan_to_num().max():.3g} of the bound"
    )


def grouped_product(a: Tensor, b: Tensor, ends: list[int]) -> Tensor:
    """Return the rows of each group times its own matrix, zeros behind the last group."""
    y = a.new_zeros(a.shape[0], b.shape[-1])
    start = 0
    for expert, end in enumerate(ends):
        y[start:end] = a[start:end] @ b[expert]
        start = end
    return y


def check_rows(y: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> None:
    """Check each group's rows, and that the tail is zero."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        assert_is_product(y[start:end], a[start:end], b[expert])
        start = end
    assert not y[start:].any()


def check_wgrad(dw: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> None:
    """Check each group's sum; an empty one must be zero."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        assert_is_product(dw[expert], a[:, start:end], b[start:end])
        start = end
