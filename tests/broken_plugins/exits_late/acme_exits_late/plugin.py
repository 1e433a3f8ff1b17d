"""Declarations of a command whose module ends the process when it is imported."""

from hp_core.contracts import Command, hookimpl

HP_API = 1


@hookimpl
def hp_commands():
    return [Command(name="leave", help="Leave", main="acme_exits_late.code:main")]
