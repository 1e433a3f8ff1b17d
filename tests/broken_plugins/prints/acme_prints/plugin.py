"""Declarations that talk."""

from hp_core.contracts import hookimpl

HP_API = 1

print("hello from acme_prints")


@hookimpl
def hp_families():
    print("hello from a hook")
    return []
