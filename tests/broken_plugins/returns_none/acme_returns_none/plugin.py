"""Declarations whose hook forgets to return."""

from hp_core.contracts import hookimpl

HP_API = 1


@hookimpl
def hp_families():
    pass
