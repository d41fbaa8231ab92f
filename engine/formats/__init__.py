"""MXFP4 number formats in plain PyTorch: the definition that kernels must equal, and the CPU path."""

from engine.formats.hadamard import Hadamard, make_hadamard
from engine.formats.mxfp4 import MXFP4Tensor, dequantise, qdq, quantise
from engine.formats.options import BLOCK_SIZE, SCALE_MODES, HadamardKind, OperandOptions, ScaleMode
from engine.formats.philox import combine_keys, noise16, operand_key, philox4x32_7, step_key
from engine.formats.scale import scale_codes

__all__ = [
    "BLOCK_SIZE",
    "SCALE_MODES",
    "Hadamard",
    "HadamardKind",
    "MXFP4Tensor",
    "OperandOptions",
    "ScaleMode",
    "combine_keys",
    "dequantise",
    "make_hadamard",
    "noise16",
    "operand_key",
    "philox4x32_7",
    "qdq",
    "quantise",
    "scale_codes",
    "step_key",
]
