"""Quantise kernels behind the functions of ``engine.formats``, chosen by what the device can do; see ``dispatch``."""

from engine.kernels.dispatch import dequantise, qdq, qdq_two, quantise, quantise_two
from engine.kernels.hadamard import DeviceHadamard, combine_key_tensors
from engine.kernels.probe import KernelPath, kernel_path

__all__ = [
    "DeviceHadamard",
    "KernelPath",
    "combine_key_tensors",
    "dequantise",
    "kernel_path",
    "qdq",
    "qdq_two",
    "quantise",
    "quantise_two",
]
