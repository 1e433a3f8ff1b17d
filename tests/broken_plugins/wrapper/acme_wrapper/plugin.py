"""Declarations that try to wrap the hooks of others."""

from hp_core.contracts import hookimpl

HP_API = 1


@hookimpl(wrapper=True)
def hp_families():
    return (yield)
