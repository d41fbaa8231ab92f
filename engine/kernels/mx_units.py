"""Which devices multiply MXFP4 natively; free of Triton."""

from __future__ import annotations

import torch


def has_mx_units(device: torch.device) -> bool:
    """Tell whether a device multiplies MXFP4 natively: gfx950 (CDNA4), or compute capability 10.x (Blackwell)."""
    if device.type != "cuda":
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx950")
    return torch.cuda.get_device_capability(device)[0] == 10
