"""Declarations that take the name of a command of hp-core."""

from hp_core.contracts import Command, hookimpl

HP_API = 1


@hookimpl
def hp_commands():
    return [Command(name="plan", help="Plan something else", main="acme_shadows.plugin:main")]


def main(argv, plugins):
    return 0
