"""Check a declaration against its contract. One function per type; all raise :class:`DeclarationError` with exact texts."""

from __future__ import annotations

import importlib
from typing import Any

VALIDATORS = {  # type name -> module of hp_core.contracts that holds validate_<...>; imported when first needed
}


def validate(declaration: Any) -> None:
    """Raise HP402 (or HP403 for a malformed lazy reference) if ``declaration`` contradicts its contract."""
    for cls in type(declaration).__mro__:
        if cls.__name__ in VALIDATORS:
            module, function = VALIDATORS[cls.__name__]
            getattr(importlib.import_module(f"hp_core.contracts.{module}"), function)(declaration)
            return
