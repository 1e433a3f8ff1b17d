"""The kinds of declarations: which hook brings them, their type, and the key each is found under."""

from __future__ import annotations

from typing import Any

KINDS = {  # hook -> kind
    "hp_adapters": "adapter",
    "hp_commands": "command",
    "hp_families": "family",
    "hp_kernels": "kernel",
    "hp_protocols": "protocol",
    "hp_schemes": "scheme",
    "hp_sections": "section",
}
TYPES = {  # kind -> name of the class in hp_core.contracts
    "adapter": "ModelAdapter",
    "command": "Command",
    "family": "ModuleFamily",
    "kernel": "Kernel",
    "protocol": "Protocol",
    "scheme": "PrecisionScheme",
    "section": "RecipeSection",
}


def keys(kind: str, declaration: Any) -> tuple[str, ...]:
    """Return the names that a declaration occupies; the first is its key in ``Plugins``."""
    if kind == "adapter":
        names = (declaration.name, *declaration.hf_model_types, *declaration.architectures)
        return tuple(name for place, name in enumerate(names) if name not in names[:place])  # not hashed: may be anything yet
    if kind == "protocol":
        return (f"{declaration.kind}:{declaration.name}",)
    if kind == "kernel":
        return (f"{declaration.op}:{declaration.name}",)
    return (declaration.name,)


def label(kind: str, declaration: Any) -> str:
    """Return the name that errors and tables show: ``rms_norm@npu`` for a kernel, else the key."""
    key = keys(kind, declaration)[0]
    return key.replace(":", "@") if kind == "kernel" else key


def plural(kind: str) -> str:
    """Return the kind in the plural, which is also the attribute of ``Plugins``."""
    return "families" if kind == "family" else f"{kind}s"
