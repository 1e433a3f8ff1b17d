"""What hp-qwen3-moe declares. Torch-free."""

from __future__ import annotations

from hp_core.contracts import ModelAdapter, hookimpl
from hp_qwen3_moe.adapter import ADAPTER

HP_API = 1


@hookimpl
def hp_adapters() -> list[ModelAdapter]:
    """Return the adapter of Qwen3-MoE."""
    return [ADAPTER]
