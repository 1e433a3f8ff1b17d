"""``hp completion``: the words that may follow, and the scripts in the shells that are installed here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from hp_core.cli.completion import SCRIPTS, words
from hp_core.cli.main import main
from hp_core.plugins.load import load_plugins
from hp_core.plugins.plugins import Plugins
from hp_core.testing.patience import HANG_S
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"


@pytest.fixture
def plugins(lone_dist: FakeSite) -> Plugins:
    """One plugin, good, which adds the command greet."""
    lone_dist.add("acme-good", version="2.0", entry="good = acme_good.plugin", tree=TREES / "good")
    return load_plugins(environ={"HP_PLUGINS": "good"})


@pytest.mark.parametrize(
    ("typed", "current", "following"),
    [
        ((), "", ["completion", "doctor", "families", "greet", "kernels", "plan", "plugins", "protocols", "verify"]),
        ((), "p", ["plan", "plugins", "protocols"]),
        ((), "--", ["--debug", "--help", "--strict", "--version"]),
        (("-p",), "no:go", ["no:good"]),
        (("-p", "no"), ":", [":good"]),
        (("-p", "no", ":"), "go", ["good"]),
        (("-p", "no:good"), "gr", ["greet"]),
        (("-p", "no", ":", "good"), "gr", ["greet"]),
        (("plugins",), "", ["check", "list", "show"]),
        (("--strict", "plugins"), "l", ["list"]),
        (("plugins", "list"), "--s", ["--static", "--strict"]),
        (("plugins", "show"), "go", ["good"]),
        (("plugins", "check"), "go", ["good"]),
        (("plan",), "", []),
        (("plan", "recipe.yaml"), "--e", ["--explain"]),
        (("kernels", "list"), "-", ["--help", "--json", "-h"]),
        (("completion",), "", ["bash", "fish", "zsh"]),
        (("greet",), "", []),
        (("no_such_command",), "", []),
    ],
)
def test_what_may_follow_depends_on_what_was_typed(
    typed: tuple[str, ...], current: str, following: list[str], plugins: Plugins
) -> None:
    assert words(typed, current=current, plugins=plugins) == following


def test_words_are_printed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "words", "plugins", ""]) == 0
    assert capsys.readouterr().out == "check\nlist\nshow\n"


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_the_script_of_a_shell_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell] + "\n"


ASK = {
    "bash": 'COMP_WORDS=(hp plugins sh); COMP_CWORD=2; _hp; echo "${COMPREPLY[@]}"',
    "zsh": 'compadd() { print -l "${(@P)2}"; }; words=(hp plugins sh); CURRENT=3; _hp',
    "fish": 'complete -C "hp plugins sh"',
}


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_a_shell_completes_with_its_script(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "hp"
    command.write_text('#!/bin/sh\n[ "$*" = "completion words plugins sh" ] && echo show\n')
    command.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    before = "compdef() { :; }\n" if shell == "zsh" else ""
    script = f"{before}{SCRIPTS[shell]}\n{ASK[shell]}\n"
    done = subprocess.run([shell, "-c", script], env=environ, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.stdout, done.returncode) == ("show\n", 0), done.stderr
