"""Kinds of devices as torch knows them: those of a backend that is not part of torch exist only where it is loaded."""

from __future__ import annotations

from typing import Any

import torch

from hp_core.errors import RunError
from hp_core.plugins.missing import device_provider


def device_module(device: str) -> Any:
    """Return torch's module for a kind of device (``torch.cuda``); HP708 where torch has no such kind here."""
    try:
        return torch.get_device_module(device)
    except RuntimeError as error:
        provider = device_provider(device)
        raise RunError(
            "HP708",
            f"torch has no device {device!r} here",
            expected="its backend to be installed, and loaded when torch is imported",
            fix=f"pip install '{provider}', or set device: cpu" if provider else "set device: cpu",
        ) from error
