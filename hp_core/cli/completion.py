"""``hp completion``: lets a shell complete commands, subcommands, options and plugin names. Never imports torch.

The scripts are short, because they ask ``hp completion words TYPED... CURRENT``: so they need not be made again when a
plugin is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from hp_core.cli.main import COMMANDS, FLAGS, commands
from hp_core.plugins import lazy
from hp_core.plugins.plugins import Plugins

BASH = """\
_hp() {
  local IFS=$'\\n'
  COMPREPLY=($(hp completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _hp hp"""
ZSH = """\
#compdef hp
_hp() {
  local -a found
  found=("${(@f)$(hp completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}
compdef _hp hp"""
FISH = """\
function __hp_words
  set -l typed (commandline -opc) (commandline -ct)
  hp completion words $typed[2..-1] 2>/dev/null
end
complete -c hp -a '(__hp_words)'"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def main(argv: list[str], plugins: Plugins) -> int:
    """Run ``hp completion`` and return its exit code."""
    if argv[:1] == ["words"]:  # not for people: what is typed may look like any option
        print("\n".join(words(argv[1:-1], current=argv[-1], plugins=plugins)))
        return 0
    print(SCRIPTS[parser().parse_args(argv).shell])
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hp completion``."""
    made = argparse.ArgumentParser(
        prog="hp completion",
        description='Print a completion script. bash, zsh: eval "$(hp completion bash)". fish: hp completion fish | source.',
        allow_abbrev=False,
    )
    made.add_argument("shell", choices=tuple(SCRIPTS))
    return made


def words(typed: Sequence[str], *, current: str, plugins: Plugins) -> list[str]:
    """Return what ``current`` may become after ``hp`` and the words ``typed``; nothing where a file name is wanted."""
    names = [record.name for record in plugins.records]
    typed = list(typed)
    if typed[-2:] == ["no", ":"]:  # bash takes no:NAME apart at the colon
        found = names
    elif typed[-1:] == ["no"] and current == ":":
        found = [f":{name}" for name in names]
    elif typed[-1:] == ["-p"]:
        found = [f"no:{name}" for name in names]
    else:
        found = list(_following(_commands_in(typed), names=names, plugins=plugins))
    return sorted(word for word in found if word.startswith(current) and word.startswith("-") == current.startswith("-"))


def _commands_in(typed: Sequence[str]) -> list[str]:
    """Return the words that are neither options nor what follows ``-p``."""
    before = ["", *typed]
    return [
        word for last, word in zip(before, typed, strict=False) if not word.startswith("-") and last not in ("-p", "no", ":")
    ]


def _following(path: list[str], *, names: list[str], plugins: Plugins) -> Iterator[str]:
    if not path:
        yield from (*commands(plugins), *FLAGS, "-p")
        return
    if path[0] not in COMMANDS:
        return
    parser: argparse.ArgumentParser = lazy.load(f"{COMMANDS[path[0]][1].partition(':')[0]}:parser")()
    for word in path[1:]:
        parser = _subcommands(parser).get(word, parser)
    yield from _subcommands(parser)
    for action in parser._actions:  # argparse has no public way to read a parser
        yield from action.option_strings
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
            yield from map(str, action.choices or ())
    if parser.prog in ("hp plugins show", "hp plugins check"):
        yield from names


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0]) if found else {}
