"""Declarations whose hook returns something else."""

from hp_core.contracts import hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [{"name": "acme"}]
