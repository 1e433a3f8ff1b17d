"""Declarations of a family whose class is not one of torch modules."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_norm", baseline="acme_not_a_module.plugin:Norm")]


class Norm:
    """Stands for something else."""
