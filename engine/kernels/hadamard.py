"""Random keys and Hadamard transforms as device tensors, so that a captured step can be replayed with new ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.formats.hadamard import Hadamard, _Stage
from engine.formats.options import BLOCK_SIZE

_STAGES = {"random": 1, "fixed": 1, "3rht": 3}
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceHadamard:
    """A :class:`engine.formats.Hadamard` whose permutations and signs a kernel reads from memory."""

    kind: Literal["random", "fixed", "3rht"]
    """Which transform this is; ``fixed`` has no permutation, and the tensor's is not read."""
    permutation: Tensor
    """int32 [stages, 32]: p of each stage."""
    signs: Tensor
    """float32 [stages, 32]: +1 or -1."""

    def __post_init__(self) -> None:
        if self.kind not in _STAGES:
            raise ValueError(f"unknown Hadamard kind {self.kind!r}; expected one of {', '.join(_STAGES)}")
        shape = (_STAGES[self.kind], BLOCK_SIZE)
        for name, tensor, dtype in (
            ("permutation", self.permutation, torch.int32),
            ("signs", self.signs, torch.float32),
        ):
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} of a {self.kind!r} transform must be contiguous {dtype} of shape {shape}; "
                    f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        if self.permutation.device != self.signs.device:
            raise ValueError(
                f"permutation is on {self.permutation.device} and signs on {self.signs.device}; put both on one device"
            )

    @classmethod
    def from_transform(cls, transform: Hadamard, device: torch.device | str) -> DeviceHadamard:
        """Copy a transform to a device."""
        permutation = torch.tensor([stage.permutation for stage in transform.stages], dtype=torch.int32)
        signs = torch.tensor([stage.signs for stage in transform.stages], dtype=torch.float32)
        return cls(kind=transform.kind, permutation=permutation.to(device), signs=signs.to(device))

    def copy_(self, transform: Hadamard) -> None:
        """Take over another transform of the same kind in place, e.g. before a captured graph is replayed.

        Raises:
            ValueError: for another kind.
        """
        if transform.kind != self.kind:
            raise ValueError(f"cannot put a {transform.kind!r} transform in place of a {self.kind!r} one")
        other = DeviceHadamard.from_transform(transform, "cpu")
        self.permutation.copy_(other.permutation)
        self.signs.copy_(other.signs)

    def to_transform(self) -> Hadamard:
        """Return the transform for the reference; waits for the device."""
        stages = zip(self.permutation.tolist(), self.signs.tolist(), strict=True)
        return Hadamard(
            kind=self.kind,
            stages=tuple(_Stage(permutation=tuple(p), signs=tuple(int(sign) for sign in signs)) for p, signs in stages),
        )


@functools.lru_cache(maxsize=8)
def on_device(transform: Hadamard, device: torch.device) -> DeviceHadamard:
    """Return a transform's copy on a device, made once: a step uses one transform for all layers."""
    return DeviceHadamard.from_transform(transform, device)


def signed64(key: int) -> int:
    """Return the int64 with the bits of 0 <= key < 2^64."""
    return key - (1 << 64) if key >> 63 else key


def key_tensor(key: int, device: torch.device) -> Tensor:
    """Return a key as int64 [1]; filled on the device, without a copy from the host."""
    return torch.full((1,), signed64(key), dtype=torch.int64, device=device)


def key_number(key: Tensor) -> int:
    """Return the key in an int64 tensor of one element as 0..2^64 - 1; waits for the device."""
    return int(key.item()) & _MASK64


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift the 64-bit words in an int64 tensor, filling with zeros."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def combine_key_tensors(step_key: Tensor, operand_keys: Tensor) -> Tensor:
    """Return ``engine.formats.combine_keys`` of a step key (int64 [1]) and each operand's key (int64 [n]), int64 [n].

    One call a micro-batch makes the keys of all layers on the device; ``keys[i : i + 1]`` is then the key of operand i.
    """
    z = step_key + operand_keys  # int64 addition and multiplication wrap, as the definition's mod 2^64
    z = (z ^ _shift_right(z, 30)) * signed64(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * signed64(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)
