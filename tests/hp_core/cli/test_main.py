"""The ``hp`` command: what it prints, where, and with which exit code."""

import sys
from pathlib import Path

import pytest

from hp_core import __version__
from hp_core.cli import main as cli
from hp_core.cli.main import Invocation, main, parse
from hp_core.contracts.extension import CORE_COMMANDS
from hp_core.errors import RunError
from hp_core.plugins import lazy
from hp_core.plugins.plugins import Plugins
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"
RECIPE = Path(__file__).parents[3] / "hp_qwen3_moe" / "recipes" / "tiny.yaml"
USAGE = "usage: hp [-h] [--version] [--debug] [--strict] [-p no:NAME] COMMAND ..."


@pytest.fixture
def good(fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """Install the plugin good, which adds the command greet, and allow no other."""
    fake_dist.add("acme-good", version="2.0", entry="good = acme_good.plugin", tree=TREES / "good")
    monkeypatch.setenv("HP_PLUGINS", "good")
    return fake_dist


@pytest.mark.parametrize(
    ("argv", "invocation"),
    [
        ([], Invocation()),
        (["--version"], Invocation(version=True)),
        (["-h"], Invocation(help=True)),
        (["plan", "a.yaml", "--json"], Invocation(command="plan", arguments=("a.yaml", "--json"))),
        (["plan", "--help"], Invocation(command="plan", arguments=("--help",))),
        (["-p", "no:npu", "-p", "no:acme", "plan"], Invocation(command="plan", disabled=("npu", "acme"))),
        (["--strict", "plan"], Invocation(command="plan", strict=True)),
        (["plan", "--strict"], Invocation(command="plan", arguments=("--strict",))),
        (["--debug", "plan", "a"], Invocation(command="plan", arguments=("a",), debug=True)),
        (["plan", "a", "--debug"], Invocation(command="plan", arguments=("a",), debug=True)),
    ],
)
def test_a_command_line_is_split_at_the_command(argv: list[str], invocation: Invocation) -> None:
    assert parse(argv) == invocation


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["-p"], "-p takes no:NAME, found ''"),
        (["-p", "npu"], "-p takes no:NAME, found 'npu'"),
        (["-p", "no:"], "-p takes no:NAME, found 'no:'"),
        (["--jsn"], "unknown option '--jsn'"),
    ],
)
def test_a_command_line_that_cannot_be_understood_is_a_usage_error(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capsys.readouterr() == ("", f"{USAGE}\nhp: {problem}\n")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"hp-core {__version__}\n", "")


@pytest.mark.usefixtures("good")
def test_help_lists_every_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr() == (
        f"""{USAGE}

Train Hugging Face language models on any device mesh.

commands:
  plan        print what a recipe does to its model on a mesh, without building it
  verify      compare a training step on a mesh with one process of unmodified code
  plugins     list, show and check the installed plugins
  families    list and show the module families that plugins provide
  protocols   list the cp and ep protocols that plugins provide
  kernels     list the kernels that plugins provide
  doctor      report what this machine has, what is missing and what that costs
  completion  print a completion script for bash, zsh or fish
  greet       Say hello

options:
  -h, --help  show this text; hp COMMAND --help shows a command's
  --version   print hp-core's version
  --debug     show the traceback of an error
  --strict    fail if a plugin is broken, incompatible or in conflict, whether or not it is used
  -p no:NAME  leave a plugin alone, by its name or its distribution's; may be repeated
""",
        "",
    )


@pytest.mark.usefixtures("good")
def test_a_contributed_command_gets_its_arguments_and_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "you", "two"]) == 7
    assert capsys.readouterr() == ("hello you two\n", "")


@pytest.mark.usefixtures("good")
def test_a_contributed_command_is_imported_only_when_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "acme_good.plugin" in sys.modules
    assert "acme_good.code" not in sys.modules
    capsys.readouterr()


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["grete"], "unknown command 'grete'; did you mean 'greet'?"),
        (["plugns", "list"], "unknown command 'plugns'; did you mean 'plugins'?"),
        (["zzz"], "unknown command 'zzz'"),
        ([], "no command given"),
    ],
)
def test_an_unknown_command_is_a_usage_error(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr() == ("", f"{USAGE}\nhp: {problem}\n")


@pytest.mark.usefixtures("good")
def test_a_command_of_a_plugin_that_is_switched_off_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-p", "no:good", "good"]) == 1
    assert capsys.readouterr() == (
        "",
        "hp: error[HP101]: no working plugin provides the command 'good'; plugin 'good' (acme-good 2.0) is blocked: "
        "disabled by -p. fix: leave out -p no:good\n",
    )


def test_an_unknown_name_after_p_is_an_error(capsys: pytest.CaptureFixture[str], good: FakeSite) -> None:
    assert main(["-p", "no:goood", "plugins", "list"]) == 1
    assert capsys.readouterr() == (
        "",
        "hp: error[HP102]: -p names 'goood', but no plugin of that name is installed; did you mean 'good'?\n",
    )


def failing(argv: list[str], plugins: Plugins) -> int:
    """Stand for a command that reports an error."""
    raise RunError("HP704", "/full/disk cannot be written", fix="free some space")


def test_an_error_is_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hp_core.plugins.lazy.load", lambda reference: failing)
    assert main(["plan"]) == 1
    assert capsys.readouterr() == ("", "hp: error[HP704]: /full/disk cannot be written. fix: free some space\n")


def test_debug_adds_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hp_core.plugins.lazy.load", lambda reference: failing)
    assert main(["plan", "--debug"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "hp: error[HP704]: /full/disk cannot be written. fix: free some space"


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_core.plugins.lazy.load", lambda reference: lambda argv, plugins: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["plan"])


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str], plugins: Plugins) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("hp_core.plugins.lazy.load", lambda reference: interrupted)
    assert main(["plan"]) == 130


def test_every_command_of_the_core_points_to_a_main_and_keeps_its_name_from_plugins() -> None:
    assert all(callable(lazy.load(reference)) for _, reference in cli.COMMANDS.values())
    assert set(cli.COMMANDS) == set(CORE_COMMANDS)
    assert set(cli.DIAGNOSES) < set(cli.COMMANDS)


@pytest.fixture
def broken(good: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """Install the plugin raises beside good, and allow both."""
    good.add("acme-raises", version="2.0", entry="raises = acme_raises.plugin", tree=TREES / "raises")
    monkeypatch.setenv("HP_PLUGINS", "good,raises")
    return good


NO_LICENCE = (
    "hp: error[HP301]: plugin 'raises' (acme-raises 2.0) failed to import: RuntimeError: no licence. acme_raises/plugin.py:3\n"
)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    ("argv", "strict", "code"),
    [
        (["greet"], "", 7),
        (["greet"], "0", 7),
        (["greet"], "1", 1),
        (["--strict", "greet"], "", 1),
        (["--strict", "-p", "no:raises", "greet"], "1", 7),
        (["plugins", "list"], "", 0),
        (["plugins", "list", "--strict"], "", 1),
        (["plugins", "list"], "1", 1),
        (["plugins", "show", "good"], "", 0),
        (["completion", "bash"], "", 0),
        (["--help"], "1", 0),
    ],
)
def test_a_broken_plugin_is_fatal_only_when_strict(
    argv: list[str], strict: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HP_PLUGINS_STRICT", strict)
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert err == (NO_LICENCE if code == 1 else "")
    assert bool(out) == (argv[-1] != "greet" or code == 7)  # what diagnoses does its work first


@pytest.mark.usefixtures("good")
def test_what_is_blocked_or_unavailable_is_not_fatal_when_strict(good: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    good.add("acme-needs-npu", entry="needs_npu = acme_needs_npu.plugin", tree=TREES / "needs_npu")
    monkeypatch.setenv("HP_PLUGINS", "good,needs_npu")
    assert main(["--strict", "greet"]) == 7


LOADED = """
import sys
from hp_core.cli.main import main
code = main(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""
CLOSED = """
import os, sys
from hp_core.cli.main import main
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
sys.exit(main(["--version"]))
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["plugins", "list"],
        ["plugins", "list", "--json"],
        ["plugins", "list", "--requirements"],
        ["plugins", "show", "trainer"],
        ["protocols", "list"],
        ["kernels", "list"],
        ["completion", "bash"],
        ["completion", "words", "plugins", ""],
    ],
)
def test_starting_up_imports_nothing_heavy(tmp_path: Path, argv: list[str]) -> None:
    done = FakeSite(tmp_path).run("-c", LOADED, *argv)
    assert done.returncode == 0, done.stderr
    heavy = {"torch", "transformers", "cattrs", "yaml", "numpy", "rich", "packaging", "difflib"}
    assert heavy.isdisjoint(done.stderr.split())


@pytest.mark.parametrize("argv", [["plan", str(RECIPE), "--print-config"], ["completion", "words", "plan", "--"]])
def test_what_needs_the_recipe_but_no_model_never_imports_torch(tmp_path: Path, argv: list[str]) -> None:
    done = FakeSite(tmp_path).run("-c", LOADED, *argv)
    assert done.returncode == 0, done.stderr
    assert {"torch", "transformers"}.isdisjoint(done.stderr.split())


def test_entry_points_of_other_distributions_are_not_loaded(fake_dist: FakeSite) -> None:
    info = fake_dist.add("other", files={"other_pkg.py": "raise RuntimeError('loaded')\n"})
    (info / "entry_points.txt").write_text("[pytest11]\nother = other_pkg\n[hp_plugins]\nother = other_pkg\n")
    done = fake_dist.run("-c", LOADED, "plugins", "list")
    assert done.returncode == 0
    assert "other_pkg" not in done.stderr.split()


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    done = FakeSite(tmp_path).run("-c", CLOSED)
    assert (done.returncode, done.stderr) == (1, "")
