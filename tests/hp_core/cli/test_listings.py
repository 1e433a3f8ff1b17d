"""``hp protocols list`` and ``hp kernels list``: what the installed plugins provide, and who would provide more."""

import json
from typing import Any

import pytest

from hp_core.cli import kernels, protocols
from hp_core.contracts import Kernel, Protocol, hookimpl
from hp_core.plugins.load import plugins_from
from hp_core.plugins.plugins import Plugins


class Acme:
    """A plugin with protocols and kernels."""

    __name__ = "acme_hp.plugin"
    HP_API = 1

    @hookimpl
    def hp_protocols(self) -> list[Protocol]:
        """Return one protocol of each kind."""
        masks = ("causal", "packed")
        return [
            Protocol(kind="ep", name="all_to_all", implementation="a:B", backends=("gloo",)),
            Protocol(
                kind="cp",
                name="ring",
                version=2,
                implementation="a:B",
                sequence_layout="zigzag",
                masks=masks,
                other_layouts=("contiguous",),
            ),
        ]

    @hookimpl
    def hp_kernels(self) -> list[Kernel]:
        """Return kernels that can and that cannot be used here."""
        return [
            Kernel(op="rms_norm", name="fast", device="cpu", implementation="a:b", requires=("json",)),
            Kernel(op="rms_norm", name="npu", device="npu", implementation="a:b", requires=("torch_npu_nobody_has",)),
            Kernel(op="swiglu", name="npu", device="npu", implementation="a:b", requires=("nobody_has_a", "nobody_has_b")),
        ]


ACME = plugins_from(Acme())


def printed(main: Any, plugins: Plugins, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what ``main list ARGV`` prints."""
    assert main(["list", *argv], plugins) == 0
    return capsys.readouterr().out


def test_protocols_are_listed_with_what_they_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hp_core.cli.output.unreleased", lambda: {"hp-context-parallel": "protocols over cp"})
    assert printed(protocols.main, ACME, capsys) == (
        "KIND  NAME        VERSION  SEQUENCE           MASKS          BACKENDS  PLUGIN\n"
        "cp    ring        2        zigzag contiguous  causal packed  all       acme_hp\n"
        "ep    all_to_all  1        -                  causal         gloo      acme_hp\n"
        "hp-context-parallel, which is not released yet, will add cp:allgather, cp:hybrid, cp:ring, cp:ulysses\n"
        "pip install hp-expert-parallel adds ep:all_to_all, ep:dedup\n"
    )


def test_kernels_are_listed_with_what_they_lack_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(kernels.main, ACME, capsys).splitlines()[:4] == [
        "OP        NAME  DEVICE  PLUGIN   STATUS",
        "rms_norm  fast  cpu     acme_hp  ok",
        "rms_norm  npu   npu     acme_hp  unavailable: torch_npu_nobody_has is not installed",
        "swiglu    npu   npu     acme_hp  unavailable: nobody_has_a and nobody_has_b are not installed",
    ]


@pytest.mark.parametrize("main", [protocols.main, kernels.main])
def test_nothing_is_said_in_words_with_the_pip_lines_that_help(main: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(main, plugins_from(), capsys).splitlines()
    assert lines[0] == f"no installed plugin provides {main.__module__.rpartition('.')[2]}"
    assert all(line.startswith(("pip install hp-", "hp-")) and " add" in line for line in lines[1:])
    assert len(lines) > 1


def test_json_is_a_list_of_mappings(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(kernels.main, ACME, capsys, "--json"))[0] == {
        "op": "rms_norm",
        "name": "fast",
        "device": "cpu",
        "plugin": "acme_hp",
        "status": "ok",
    }
    assert json.loads(printed(protocols.main, ACME, capsys, "--json"))[0]["masks"] == ["causal", "packed"]
    assert json.loads(printed(protocols.main, plugins_from(), capsys, "--json")) == []
