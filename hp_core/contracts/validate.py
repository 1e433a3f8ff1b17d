"""Check a declaration against its contract: one function per type, imported when a declaration of that type comes by."""

from __future__ import annotations

import importlib
from typing import Any

VALIDATORS = {  # type name -> lazy validator
    "Command": "validate_extension:validate_command",
    "Kernel": "validate_extension:validate_kernel",
    "LayoutRule": "validate_adapter:validate_layout_rule",
    "ModelAdapter": "validate_adapter:validate_adapter",
    "ModuleFamily": "validate_family:validate_family",
    "ModuleShardingSpec": "validate_sharding:validate_sharding",
    "NativeParallelBindingRequest": "validate_parallel:validate_native_request",
    "ParallelModuleSpec": "validate_parallel:validate_parallel",
    "PrecisionScheme": "validate_extension:validate_scheme",
    "Protocol": "validate_parallel:validate_protocol",
    "RecipeSection": "validate_extension:validate_section",
}


def validate(declaration: Any) -> None:
    """Raise HP402, or HP403 for a malformed lazy reference, if ``declaration`` contradicts its contract.

    Accepts every type that a hook returns, layout rules, sharding specs and parallel specs. It looks at the declaration
    alone: whether references point to something, and whether names are unique over all plugins, is checked at loading.
    """
    name = next(cls.__name__ for cls in type(declaration).__mro__ if cls.__name__ in VALIDATORS)
    module, _, function = VALIDATORS[name].partition(":")
    getattr(importlib.import_module(f"hp_core.contracts.{module}"), function)(declaration)
