"""torch_npu's operators, loaded when the first kernel runs."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hp_core.errors import PlanError


def operator(name: str) -> Any:
    """Return ``torch.ops.npu.NAME``; loads torch_npu, which registers it, if nobody has. HP571 where it is not installed."""
    if not hasattr(torch.ops.npu, name):
        try:
            importlib.import_module("torch_npu")
        except ModuleNotFoundError as error:
            raise PlanError(
                "HP571",
                f"the operator {name} belongs to torch_npu, which this machine does not have",
                fix="pip install 'hp-npu[npu]' on a machine with CANN, or choose another kernel",
            ) from error
    return getattr(torch.ops.npu, name)
