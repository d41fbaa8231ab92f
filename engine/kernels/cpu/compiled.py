"""Quantise-dequantise on a CPU through the compiled library; the same function as :func:`engine.formats.qdq`."""

from __future__ import annotations

import ctypes
import functools
import math

import torch
from torch import Tensor

from engine.formats import Hadamard, OperandOptions
from engine.formats.hadamard import constants
from engine.formats.mxfp4 import check_call, check_output, layout_of
from engine.formats.scale import bump_to_target
from engine.kernels.cpu.build import load


class _Job(ctypes.Structure):
    """struct Job of mxfp4.c."""

    _fields_ = (
        ("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("outer", ctypes.c_int64), ("inner", ctypes.c_int64),
        ("in_bf16", ctypes.c_int32), ("out_bf16", ctypes.c_int32), ("bump", ctypes.c_int32), ("tiled", ctypes.c_int32),
        ("sr", ctypes.c_int32), ("clip", ctypes.c_int32), ("key_low", ctypes.c_uint32), ("key_high", ctypes.c_uint32),
        ("first_element", ctypes.c_uint64), ("stages", ctypes.c_int32), ("permutation", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _tables(transform: Hadamard) -> tuple[Tensor, Tensor]:
    """Return permutations int32 [stages, 32] and factors fp32 [stages, 32]."""
    rows = [constants(stage, torch.device("cpu")) for stage in transform.stages]
    permutations = torch.stack([permutation.to(torch.int32) for permutation, _, _ in rows])
    return permutations, torch.stack([factors.view(-1) for _, _, factors in rows]).contiguous()


def qdq(
    x: Tensor,
    options: OperandOptions,
    *,
    key: int | None = None,
    transform: Hadamard | None = None,
    row_offset: int = 0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise and dequantise a CPU tensor; arguments, result and errors as :func:`engine.formats.qdq`.

    Raises:
        RuntimeError: if there is no compiled library; see :func:`engine.kernels.cpu.build.load`.
    """
    check_call(x, options, key, transform, row_offset)
    layout = layout_of(x.shape, options)
    dtype = out_dtype or x.dtype
    check_output(dtype)
    library = load().library
    if library is None:
        raise RuntimeError(load().reason)
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    if x.numel() == 0:
        return out, torch.zeros((), dtype=torch.int64)
    job = _Job(
        x=x.data_ptr(), out=out.data_ptr(), outer=layout.view[0], inner=math.prod(layout.view[2:]),
        in_bf16=x.dtype is torch.bfloat16, out_bf16=dtype is torch.bfloat16, bump=bump_to_target(options.scale_mode),
        tiled=options.block == "2d", sr=options.rounding == "sr", clip=options.clip == "static",
        first_element=row_offset * x.shape[-1],
    )  # fmt: skip
    if key is not None:
        job.key_low, job.key_high = key & 0xFFFFFFFF, key >> 32
    if transform is not None:
        permutation, factors = _tables(transform)
        job.stages, job.permutation, job.factors = len(permutation), permutation.data_ptr(), factors.data_ptr()
    return out, torch.tensor(library.lptctl_qdq(ctypes.byref(job)), dtype=torch.int64)
