"""SwiGLU by ``npu_swiglu``."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_npu.kernels.empty import zeros_from
from hp_npu.operators import operator


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, shaped and typed like both. The operator takes both in one tensor, the gate first."""
    if gate.numel() == 0:
        return zeros_from(gate.shape, gate, up)
    out: Tensor = operator("npu_swiglu")(torch.cat((gate, up), dim=-1), dim=-1)
    return out
