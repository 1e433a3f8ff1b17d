"""What kernels lack here, in words, and the pip line of the extra that brings it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.cli.doctor import Missing, examine
from hp_core.cli.main import main
from hp_core.plugins.availability import absent, extra_line, not_installed
from hp_core.plugins.load import load_plugins
from hp_core.plugins.missing import device_provider
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"
LINES = (
    "hp-core>=0.1",
    "torch-npu_that.nobody-has>=2; extra == 'npu'",
    "other-thing; extra == 'npu'",
    'other_thing ; python_version > "3" and extra == "more"',
)


@pytest.fixture
def needs_npu(fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a plugin whose kernel needs what its extra ``npu`` brings."""
    fake_dist.add("acme-hp", entry="needs_npu = acme_needs_npu.plugin", requires=LINES, tree=TREES / "needs_npu")
    monkeypatch.setenv("HP_PLUGINS", "needs_npu")


def test_absent_modules_are_named_in_order() -> None:
    assert absent(["nobody_has_b", "json", "nobody_has_a"]) == ["nobody_has_b", "nobody_has_a"]
    assert not_installed(["b"]) == "b is not installed"
    assert not_installed(["b", "a"]) == "b and a are not installed"


@pytest.mark.parametrize(
    ("modules", "line"),
    [
        (["torch_npu_that_nobody_has"], "pip install 'acme-hp[npu]'"),
        (["torch_npu_that_nobody_has.part", "other_thing"], "pip install 'acme-hp[npu]'"),
        (["other_thing"], "pip install 'acme-hp[more]'"),
        (["json"], ""),
        ([], ""),
    ],
)
def test_the_extra_that_brings_all_modules_is_the_pip_line(modules: list[str], line: str, needs_npu: None) -> None:
    assert extra_line("acme-hp", modules) == line


def test_a_distribution_that_is_not_installed_has_no_extra() -> None:
    assert extra_line("nobody-has-it", ["torch_npu"]) == ""


def test_every_command_that_tells_of_it_gives_the_line(needs_npu: None, capsys: pytest.CaptureFixture[str]) -> None:
    reason, line = "unavailable: torch_npu_that_nobody_has is not installed", "pip install 'acme-hp[npu]'"
    assert main(["kernels", "list"]) == 0
    assert f"rms_norm  acme  npu     needs_npu  {reason}. fix: {line}\n" in capsys.readouterr().out
    main(["plugins", "check", "--all"])
    assert f"  5 resolve       {reason}. fix: {line}\n" in capsys.readouterr().out
    missing = examine(load_plugins()).missing
    assert [item for item in missing if item.fix == line] == [
        Missing(what=f"needs_npu: {reason.partition(': ')[2]}", costs="2 kernels @acme", fix=line)
    ]


def test_the_backend_of_an_npu_is_known() -> None:
    assert device_provider("npu") == "hp-npu[npu]"
    assert device_provider("cuda") is None
