"""Declarations whose hook fails."""

from hp_core.contracts import hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [1 / 0]
