"""Declarations with a misspelt hook."""

from hp_core.contracts import hookimpl

HP_API = 1


@hookimpl
def hp_familys():
    return []
