"""``hp plugins list``: the table, the JSON, and every kind of broken plugin beside working ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import hp_core
from hp_core.cli.main import main
from hp_core.cli.plugins import as_table, provides, requirements, status
from hp_core.plugins._metadata import location
from hp_core.plugins.load import load_plugins
from hp_core.plugins.record import PluginRecord
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"


def record(**fields: Any) -> PluginRecord:
    """Return a record with ``fields``."""
    return PluginRecord(**{"name": "acme", "distribution": "acme-hp", "version": "2.0", **fields})


def test_the_table_has_one_aligned_line_per_plugin() -> None:
    records = [
        record(
            name="deepseek",
            distribution="hp-deepseek",
            version="0.1.0",
            provides=("adapter deepseek_v3", "family mla", "family router"),
        ),
        record(
            name="npu",
            distribution="hp-npu",
            version="0.1.0",
            status="unavailable",
            reason="torch_npu is not installed",
            provides=tuple(f"kernel op{number}@npu" for number in range(8)),
        ),
        record(name="qwen3_moe", distribution="hp-qwen3-moe", version="0.1.0", editable=True, provides=("adapter qwen3_moe",)),
        record(name="acme_moe", status="incompatible", reason="needs hp-core>=0.4, found 0.1.0"),
    ]
    assert as_table(records) == (
        "NAME       DISTRIBUTION  VERSION  PROVIDES                              STATUS\n"
        "deepseek   hp-deepseek   0.1.0    adapter deepseek_v3; family mla (+1)  ok\n"
        "npu        hp-npu        0.1.0    8 kernels @npu                        unavailable: torch_npu is not installed\n"
        "qwen3_moe  hp-qwen3-moe  0.1.0    adapter qwen3_moe                     ok (editable)\n"
        "acme_moe   acme-hp       2.0      -                                     "
        "incompatible: needs hp-core>=0.4, found 0.1.0"
    )


def test_no_plugins_are_said_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hp_core.plugins._metadata.discover", list)
    assert main(["plugins", "list"]) == 0
    assert capsys.readouterr().out == "no plugins are installed\n"


@pytest.mark.parametrize(
    ("names", "summary"),
    [
        ((), "-"),
        (("command train",), "command train"),
        (("command train", "section data", "section run", "section train"), "command train; section data (+2)"),
        (("kernel rms_norm@npu",), "kernel rms_norm@npu"),
        (("kernel rms_norm@fast", "kernel rms_norm@npu", "kernel rotary@npu"), "3 kernels @fast @npu"),
    ],
)
def test_what_a_plugin_provides_is_kept_short(names: tuple[str, ...], summary: str) -> None:
    assert provides(record(provides=names)) == summary


def test_a_status_comes_with_its_reason() -> None:
    assert status(record(status="blocked", reason="disabled by -p")) == "blocked: disabled by -p"


def test_json_holds_every_field(
    fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_dist.add("acme-good", version="2.0", entry="good = acme_good.plugin", tree=TREES / "good")
    monkeypatch.setenv("HP_PLUGINS", "good")
    assert main(["plugins", "list", "--json"]) == 0
    found = next(entry for entry in json.loads(capsys.readouterr().out) if entry["name"] == "good")
    assert found == {
        "name": "good",
        "distribution": "acme-good",
        "version": "2.0",
        "path": str(fake_dist.folder),
        "editable": False,
        "core": ">=0.1",
        "api": 1,
        "status": "ok",
        "code": None,
        "reason": None,
        "fix": "",
        "provides": ["command greet", "family good_norm", "section good"],
    }


@pytest.mark.parametrize(
    "argv", [["--jsn"], ["--json", "--requirements"], ["--static", "--kind", "family"], ["--kind", "familly"]]
)
def test_a_command_line_that_cannot_be_understood_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plugins", "list", *argv])
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.fixture
def site(fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """Three plugins: one that works, one that fails on import, one that asks for another hp-core."""
    fake_dist.add("acme-good", version="2.0", entry="good = acme_good.plugin", tree=TREES / "good")
    fake_dist.add("acme-raises", version="2.0", entry="raises = acme_raises.plugin", tree=TREES / "raises")
    newer = TREES / "needs_newer_core"
    fake_dist.add("acme-newer", entry="newer = acme_needs_newer_core.plugin", tree=newer, requires=("hp-core>=0.4",))
    monkeypatch.setenv("HP_PLUGINS", "good,raises,newer")
    return fake_dist


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """Return the lines of ``hp plugins list`` that tell of the three plugins, without the header."""
    assert main(["plugins", "list", *argv]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.split()[0] in ("good", "raises", "newer")]


@pytest.mark.usefixtures("site")
def test_static_runs_no_code_of_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split(maxsplit=3)[3] for line in listed(capsys, "--static")] == [
        "ok",
        "incompatible: needs hp-core>=0.4, found 0.1.0",
        "ok",
    ]
    assert not {"acme_good", "acme_raises"} & set(sys.modules)


@pytest.mark.usefixtures("site")
def test_kind_keeps_the_plugins_that_provide_it_and_only_that_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = listed(capsys, "--kind", "section")
    assert line.split() == ["good", "acme-good", "2.0", "section", "good", "ok"]


@pytest.mark.usefixtures("site")
def test_nothing_of_a_kind_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--kind", "scheme"]) == 0
    assert capsys.readouterr().out == "no plugins are installed that provide a scheme\n"


@pytest.mark.usefixtures("site")
def test_requirements_are_the_pip_lines_of_what_can_be_used(capsys: pytest.CaptureFixture[str], site: FakeSite) -> None:
    info = site.add("acme-edited", entry="edited = acme_edited.plugin", files={"acme_edited/plugin.py": "HP_API = 1\n"})
    (info / "direct_url.json").write_text('{"url": "file:///home/me/acme%20hp", "dir_info": {"editable": true}}')
    assert main(["-p", "no:newer", "plugins", "list", "--requirements"]) == 0
    assert "acme-edited" not in capsys.readouterr().out  # HP_PLUGINS does not name it
    plugins = load_plugins(environ={"HP_PLUGINS": "good,raises,newer,edited"})
    place = f"-e {Path(hp_core.__file__).parents[1]}" if location("hp-core")[1] else f"hp-core=={hp_core.__version__}"
    assert requirements(plugins) == ["-e '/home/me/acme hp'", "acme-good==2.0", place]


@pytest.mark.usefixtures("site")
def test_show_tells_everything_about_one_plugin(capsys: pytest.CaptureFixture[str], site: FakeSite) -> None:
    assert main(["plugins", "show", "acme-good"]) == 0
    assert (
        capsys.readouterr().out
        == f"""\
name           good
distribution   acme-good 2.0
path           {site.folder}
needs hp-core  >=0.1
plugin API     1
status         ok

command greet
  main  acme_good.code:greet

family good_norm
  baseline  acme_good.norm:Norm

section good
  schema  acme_good.code:Section
"""
    )


@pytest.mark.usefixtures("site")
def test_show_tells_what_is_wrong_and_what_to_do(capsys: pytest.CaptureFixture[str], site: FakeSite) -> None:
    assert main(["plugins", "show", "newer"]) == 0
    assert (
        capsys.readouterr().out
        == f"""\
name           newer
distribution   acme-newer 1.0
path           {site.folder}
needs hp-core  >=0.4
plugin API     unknown
status         incompatible: needs hp-core>=0.4, found 0.1.0
hp: error[HP201]: plugin 'newer' (acme-newer 1.0) needs hp-core>=0.4, found 0.1.0. fix: pip install -U hp-core
"""
    )


def test_show_of_an_unknown_name_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "trayner"]) == 1
    assert capsys.readouterr().err == (
        "hp: error[HP102]: hp plugins show names 'trayner', but no plugin of that name is installed; did you mean 'trainer'?\n"
    )


def test_all_broken_plugins_together_break_neither_the_list_nor_the_others(fake_dist: FakeSite) -> None:
    for tree in sorted(path.name for path in TREES.iterdir() if path.is_dir()):
        package = next(path.name for path in sorted((TREES / tree).iterdir()) if path.name != "__pycache__")
        fake_dist.add(f"acme-{tree.replace('_', '-')}", entry=f"{tree} = {package}.plugin", tree=TREES / tree)
    done = fake_dist.hp("plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    statuses = {entry["name"]: entry["status"] for entry in json.loads(done.stdout)}
    good = {name for name, found in statuses.items() if found == "ok"}
    assert good >= {"good", "prints", "components", "qwen3_moe", "trainer"}
    assert {found for name, found in statuses.items() if name not in good} == {
        "broken",
        "conflict",
        "incompatible",
        "unavailable",
    }
    greeting = fake_dist.hp("greet", "you")
    assert (greeting.returncode, greeting.stdout) == (7, "hello you\n")
