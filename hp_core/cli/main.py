"""The ``hp`` command: global options, then a command of hp-core or of a plugin. Torch is imported by commands only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from hp_core import __version__
from hp_core.cli.output import table
from hp_core.errors import HPError, suggest
from hp_core.plugins import lazy
from hp_core.plugins.load import load_plugins, survey
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.switches import is_strict

COMMANDS = {  # of hp-core itself: name -> (help, lazy main)
    "plan": ("print what a recipe does to its model on a mesh, without building it", "hp_core.cli.plan:main"),
    "verify": ("compare a training step on a mesh with one process of unmodified code", "hp_core.cli.verify:main"),
    "plugins": ("list, show and check the installed plugins", "hp_core.cli.plugins:main"),
    "families": ("list and show the module families that plugins provide", "hp_core.cli.families:main"),
    "protocols": ("list the cp and ep protocols that plugins provide", "hp_core.cli.protocols:main"),
    "kernels": ("list the kernels that plugins provide", "hp_core.cli.kernels:main"),
    "doctor": ("report what this machine has, what is missing and what that costs", "hp_core.cli.doctor:main"),
    "completion": ("print a completion script for bash, zsh or fish", "hp_core.cli.completion:main"),
}
DIAGNOSES = ("plugins", "doctor", "completion")  # these do their work although a plugin is broken, also when strict
USAGE = "usage: hp [-h] [--version] [--debug] [--strict] [-p no:NAME] COMMAND ..."
OPTIONS = (
    ("-h, --help", "show this text; hp COMMAND --help shows a command's"),
    ("--version", "print hp-core's version"),
    ("--debug", "show the traceback of an error"),
    ("--strict", "fail if a plugin is broken, incompatible or in conflict, whether or not it is used"),
    ("-p no:NAME", "leave a plugin alone, by its name or its distribution's; may be repeated"),
)
FLAGS = {"-h": "help", "--help": "help", "--version": "version", "--debug": "debug", "--strict": "strict"}


@attrs.frozen(kw_only=True)
class Invocation:
    """What a command line asks for: global options, the command's name (None: none given) and its own arguments."""

    command: str | None = None
    arguments: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()
    help: bool = False
    version: bool = False
    debug: bool = False
    strict: bool = False


class UsageError(Exception):
    """A command line that cannot be understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hp`` and return its exit code: 0 done, 1 a reported error, 2 a command line that cannot be understood.

    Example::

        main(["plugins", "list"])
    """
    try:
        invocation = parse(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        return _usage(str(error))
    try:
        code = _run(invocation)
        sys.stdout.flush()  # here, where a reader that has gone is caught, and not when the interpreter ends
        return code
    except HPError as error:
        if invocation.debug:
            _print_traceback(error)
        print(error.line, file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone: not worth a message
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as interrupt:
        if interrupt.args:  # what was interrupted, such as the loading of a plugin that hangs
            print(f"hp: interrupted {interrupt}", file=sys.stderr)
        return 130


def parse(argv: Sequence[str]) -> Invocation:
    """Split a command line; everything after the command is the command's own, except ``--debug``."""
    invocation = Invocation()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "-p":
            invocation = attrs.evolve(invocation, disabled=(*invocation.disabled, _switched_off(rest)))
        elif argument in FLAGS:
            flag: dict[str, Any] = {FLAGS[argument]: True}
            invocation = attrs.evolve(invocation, **flag)
        elif argument.startswith("-"):
            raise UsageError(f"unknown option {argument!r}")
        else:
            own = tuple(word for word in rest if word != "--debug")
            return attrs.evolve(invocation, command=argument, arguments=own, debug=invocation.debug or len(own) < len(rest))
    return invocation


def _switched_off(rest: list[str]) -> str:
    value = rest.pop(0) if rest else ""
    if not value.startswith("no:") or value == "no:":
        raise UsageError(f"-p takes no:NAME, found {value!r}")
    return value.removeprefix("no:")


def _run(invocation: Invocation) -> int:
    if invocation.version:
        print(f"hp-core {__version__}")
        return 0
    if invocation.command is None and not invocation.help:
        return _usage("no command given")
    plugins = _load(invocation)
    if invocation.help or invocation.command is None:
        print(help_text(plugins))
        return 0
    strict = invocation.strict or is_strict(os.environ)
    if strict and invocation.command not in DIAGNOSES:
        plugins.check_strictly()
    code = _run_command(invocation.command, list(invocation.arguments), plugins=plugins)
    if strict and not code:
        plugins.check_strictly()
    return code


def _load(invocation: Invocation) -> Plugins:
    """Return the plugins that the command line leaves on; under ``hp plugins list --static`` no plugin's code is run."""
    if invocation.command == "plugins" and invocation.arguments[:1] == ("list",) and "--static" in invocation.arguments:
        return survey(disabled=invocation.disabled, source="-p")
    return load_plugins(disabled=invocation.disabled, source="-p", strict=False)


def _run_command(name: str, arguments: list[str], *, plugins: Plugins) -> int:
    if name in COMMANDS:
        reference = COMMANDS[name][1]
    elif plugins.knows("command", name):
        reference = plugins.provided("command", name).declaration.main
    else:
        return _usage(f"unknown command {name!r}{suggest(name, (*COMMANDS, *plugins.commands))}")
    return int(lazy.load(reference)(arguments, plugins) or 0)


def commands(plugins: Plugins) -> Mapping[str, str]:
    """Return every command with its line of help, hp-core's own first."""
    contributed = {name: provided.declaration.help for name, provided in sorted(plugins.commands.items())}
    return {**{name: text for name, (text, _) in COMMANDS.items()}, **contributed}


def help_text(plugins: Plugins) -> str:
    """Return what ``hp --help`` prints: every command with one line."""
    parts = (
        USAGE,
        "",
        "Train Hugging Face language models on any device mesh.",
        "",
        "commands:",
        *table(commands(plugins).items(), indent=2),
        "",
        "options:",
        *table(OPTIONS, indent=2),
    )
    return "\n".join(parts)


def _usage(problem: str) -> int:
    print(f"{USAGE}\nhp: {problem}", file=sys.stderr)
    return 2


def _print_traceback(error: HPError) -> None:
    import traceback

    traceback.print_exception(error)
