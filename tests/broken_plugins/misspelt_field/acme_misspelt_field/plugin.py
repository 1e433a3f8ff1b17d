"""Declarations with a misspelt field."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_norm", baselin="acme_misspelt_field.plugin:hp_families")]
