"""Declarations whose reference points to a module that is not there."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_norm", baseline="acme_dangling_reference.norm:Norm")]
