"""Declarations of a family whose module lacks the class that is named."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_norm", baseline="acme_no_attribute.code:Nrom")]
