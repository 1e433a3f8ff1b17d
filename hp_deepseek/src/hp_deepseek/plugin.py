"""What hp-deepseek declares. Torch-free."""

from __future__ import annotations

from hp_core.contracts import ModelAdapter, hookimpl
from hp_deepseek.adapter import ADAPTER

HP_API = 1


@hookimpl
def hp_adapters() -> list[ModelAdapter]:
    """Return the adapter of DeepSeek-V3."""
    return [ADAPTER]
