"""``hp doctor``: the report, its exit code, and a machine that lacks things."""

import json
import sys

import pytest

from hp_core.cli import doctor
from hp_core.cli.doctor import Health, Missing, as_text, examine
from hp_core.cli.main import main
from hp_core.plugins.load import load_plugins, plugins_from
from hp_core.plugins.record import PluginRecord
from hp_core.testing.plugins import FakeSite

SICK = Health(
    python="3.12.0",
    packages={"hp-core": "0.1.0", "torch": "2.13.0", "transformers": None},
    devices={"cpu": ("8 cores, 16 GiB",), "cuda": ("NVIDIA H200", "NVIDIA H200")},
    backends=("gloo", "nccl"),
    plugins=(PluginRecord(name="acme", distribution="acme-hp", version="2.0"),),
    missing=(Missing(what="hp-npu", costs="8 kernels less", fix="pip install hp-npu"), Missing(what="x", costs="y")),
    faults=("hp-core needs transformers<6,>=5.20, which is not installed. fix: pip install 'transformers<6,>=5.20'",),
)


def test_the_report_has_facts_plugins_what_is_missing_and_faults() -> None:
    assert as_text(SICK) == (
        "python        3.12.0\n"
        "hp-core       0.1.0\n"
        "torch         2.13.0\n"
        "transformers  not installed\n"
        "devices       cpu (8 cores, 16 GiB); cuda (NVIDIA H200, NVIDIA H200)\n"
        "backends      gloo nccl\n"
        "\n"
        "NAME  DISTRIBUTION  VERSION  PROVIDES  STATUS\n"
        "acme  acme-hp       2.0      -         ok\n"
        "\n"
        "MISSING  COSTS           FIX\n"
        "hp-npu   8 kernels less  pip install hp-npu\n"
        "x        y               -\n"
        "\n"
        "hp-core needs transformers<6,>=5.20, which is not installed. fix: pip install 'transformers<6,>=5.20'"
    )


def test_this_machine_is_reported_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"].keys() == {"hp-core", "torch", "transformers"}
    assert len(report["devices"]["cpu"]) == 1
    assert "gloo" in report["backends"]
    assert report["faults"] == []
    assert {entry["name"]: entry["status"] for entry in report["plugins"]}["trainer"] == "ok"


def test_a_known_model_whose_plugin_is_missing_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_core.plugins.missing.unreleased", lambda: {"hp-deepseek": "DeepSeek-V3"})
    found = {item.what: item for item in examine(plugins_from()).missing}
    assert found["hp-qwen3-moe"] == Missing(
        what="hp-qwen3-moe", costs="no adapters Qwen3MoeForCausalLM, qwen3_moe", fix="pip install hp-qwen3-moe"
    )
    assert found["hp-trainer"] == Missing(
        what="hp-trainer", costs="no command train; no sections checkpoint, data, run, train", fix="pip install hp-trainer"
    )
    assert found["hp-npu"].costs == "8 kernels less"
    assert found["hp-deepseek (not released yet)"] == Missing(
        what="hp-deepseek (not released yet)", costs="no adapters DeepseekV3ForCausalLM, deepseek_v3"
    )


def test_an_unavailable_plugin_is_missing_something_and_no_fault(fake_dist: FakeSite) -> None:
    fake_dist.add("acme-hp", entry="acme = acme_hp.plugin", requires=("acme-nobody-has>=2",))
    health = examine(load_plugins(environ={"HP_PLUGINS": "acme"}))
    assert health.faults == ()
    assert (
        Missing(
            what="acme: needs acme-nobody-has>=2, which is not installed",
            costs="nothing that it provides can be used",
            fix="pip install 'acme-nobody-has>=2'",
        )
        in health.missing
    )


def test_a_broken_plugin_is_a_fault_and_exit_code_1(
    fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_dist.add("acme-hp", version="2.0", entry="acme = acme_hp.plugin", files={"acme_hp/plugin.py": "1 / 0\n"})
    monkeypatch.setenv("HP_PLUGINS", "acme")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith(
        "\nhp: error[HP301]: plugin 'acme' (acme-hp 2.0) failed to import: ZeroDivisionError: division by zero. "
        "acme_hp/plugin.py:1\n"
    )


@pytest.mark.parametrize(
    ("needs", "fault"),
    [
        ((), "torch cannot be imported: ModuleNotFoundError: import of hp_core.cli.machine halted; None in sys.modules"),
        (
            (("torch", ">=2.13", None),),
            "hp-core needs torch>=2.13, which is not installed. fix: pip install 'torch>=2.13'",
        ),
        ((("torch", ">=2.13", "2.9.1"),), "hp-core needs torch>=2.13, found 2.9.1. fix: pip install 'torch>=2.13'"),
    ],
)
def test_a_torch_that_does_not_fit_is_one_fault(
    monkeypatch: pytest.MonkeyPatch, needs: tuple[tuple[str, str, str | None], ...], fault: str
) -> None:
    monkeypatch.setitem(sys.modules, "hp_core.cli.machine", None)
    monkeypatch.setattr(doctor, "misfits", lambda requires: iter(needs))
    assert examine(plugins_from()).faults == (fault,)


def test_a_machine_without_an_accelerator_or_a_compiler_is_told_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("hp_core.cli.machine.ACCELERATORS", ())
    found = {item.what: (item.costs, item.fix) for item in examine(plugins_from()).missing if not item.what.startswith("hp-")}
    assert found == {
        "an accelerator": ("models run on the CPU: plans, tests and small models only", ""),
        "a C++ compiler": ("no compile on the CPU", "install g++ or clang++"),
    }


def test_gpus_without_nccl_are_told_what_that_costs() -> None:
    missing = list(doctor._missing_hardware({"cpu": (), "cuda": ("NVIDIA H200",)}, ("gloo",)))
    assert missing[0] == Missing(what="nccl", costs="no job on several GPUs", fix="install a torch built for CUDA")
