"""Declarations of a family whose class announces a stage that it does not define."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_experts", baseline="acme_no_stage.code:Experts")]
