"""Which lazy references a declaration holds, so that they can be checked without importing anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FIELDS = {  # type name -> fields that hold a lazy reference or None
    "Command": ("main",),
    "Kernel": ("implementation", "condition"),
    "LayoutRule": ("provider",),
    "Init": ("function",),
    "ModelAdapter": ("model_class", "config_class", "config_checks", "counts", "residual", "checkpoint", "flops", "shrink"),
    "ModuleFamily": ("baseline", "sharding", "validate"),
    "NativeParallelBindingRequest": (),
    "ParallelModuleSpec": ("validate", "validate_materialized"),
    "PrecisionScheme": ("implementation",),
    "Protocol": ("implementation", "validate", "traffic"),
    "RecipeSection": ("schema",),
}


def references(declaration: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(field, value)`` for every lazy reference that is set, e.g. ``("variants.fused", "acme.fused:Fused")``."""
    for field in FIELDS.get(_kind(declaration), ()):
        value = getattr(declaration, field)
        if value is not None:
            yield field, value
    for field, parts in _parts(declaration):
        for part in parts:
            match = ", ".join(part.match) if hasattr(part, "parallel") else getattr(part, "match", "")
            label = f"{field}.{part.name}" if hasattr(part, "name") else f"{field} for {match!r}"
            yield from ((f"{label}.{inner}", value) for inner, value in references(part))
    if _kind(declaration) == "ModuleFamily":
        yield from ((f"variants.{name}", value) for name, value in declaration.variants.items())
    if _kind(declaration) == "NativeParallelBindingRequest":
        yield from references(declaration.parallel)


def _parts(declaration: Any) -> Iterator[tuple[str, Any]]:
    if _kind(declaration) == "ModelAdapter":
        yield "layout", declaration.layout
        yield "init", declaration.init
        yield "bindings", declaration.bindings
    if _kind(declaration) == "ModuleFamily":
        yield "init", declaration.init


def _kind(declaration: Any) -> str:
    return next((cls.__name__ for cls in type(declaration).__mro__ if cls.__name__ in FIELDS), "")
