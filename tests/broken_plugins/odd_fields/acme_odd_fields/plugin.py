"""Declarations with a field that holds something else entirely."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_norm", baseline="acme_odd_fields.plugin:HP_API", rules=("no rule",))]
