"""``hp plugins list``: the table, the JSON, and every kind of broken plugin beside working ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from hp_core.cli.main import main
from hp_core.cli.plugins import as_table, provides, status
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


def test_no_plugins_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_table([]) == "no plugins are installed"


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
        "provides": ["command greet", "family good_norm", "section good"],
    }


def test_a_command_line_that_cannot_be_understood_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plugins", "list", "--jsn"])
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


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
