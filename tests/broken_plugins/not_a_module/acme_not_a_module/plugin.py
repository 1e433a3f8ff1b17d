"""Declarations of a family whose baseline is a function."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_norm", baseline="acme_not_a_module.plugin:hp_families")]
