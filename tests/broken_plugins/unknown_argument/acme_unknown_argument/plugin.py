"""Declarations whose hook asks for something that it is not given."""

from hp_core.contracts import hookimpl

HP_API = 1


@hookimpl
def hp_check_plan(plan, model):
    return []
