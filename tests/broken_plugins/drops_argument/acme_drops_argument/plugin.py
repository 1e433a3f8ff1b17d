"""Declarations whose hook does not ask for what it is offered, which is legal."""

from hp_core.contracts import Problem, hookimpl

HP_API = 1


@hookimpl
def hp_check_plan():
    return [Problem(what="never on a Friday")]
