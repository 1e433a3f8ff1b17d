"""Declarations of a family whose class does not take the declared arguments."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_norm", baseline="acme_other_arguments.code:Norm", arguments={"eps": "float"})]
