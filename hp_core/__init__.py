"""HP trains Hugging Face language models on any device mesh. Public verbs: ``build``, ``plan``, ``apply``, ``local``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hp_core.applier.apply import apply as apply
    from hp_core.applier.view import local as local
    from hp_core.models.build import build as build
    from hp_core.planner.plan import plan as plan

__version__ = "0.1.0"

_VERBS = {
    "apply": "hp_core.applier.apply",
    "build": "hp_core.models.build",
    "local": "hp_core.applier.view",
    "plan": "hp_core.planner.plan",
}


def __getattr__(name: str) -> Any:
    """Import a verb on first use, so that importing ``hp_core`` never imports torch."""
    if name not in _VERBS:
        raise AttributeError(f"module 'hp_core' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_VERBS[name]), name)
