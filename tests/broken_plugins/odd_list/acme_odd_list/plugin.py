"""Declarations whose list ends the process when it is read."""

from hp_core.contracts import hookimpl

HP_API = 1


class Families(list):
    """Stands for a list that is not one."""

    def __iter__(self):
        raise SystemExit("not iterable")


@hookimpl
def hp_families():
    return Families()
