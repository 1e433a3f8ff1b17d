"""``hp plugins check``: a line per stage, and what stage 5 finds in plugins that list well."""

from pathlib import Path

import pytest

from hp_core.cli import check as checking
from hp_core.cli.main import main
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"
STAGES = ["found", "metadata", "import", "hooks", "declarations", "resolve"]


def install(site: FakeSite, name: str, *, requires: tuple[str, ...] = ("hp-core>=0.1",)) -> None:
    """Install the tree ``name`` as distribution acme-NAME 2.0 with the plugin NAME."""
    entry = f"{name} = acme_{name}.plugin"
    site.add(f"acme-{name.replace('_', '-')}", version="2.0", entry=entry, tree=TREES / name, requires=requires)


def table(*lines: str) -> str:
    """Return the lines of the stages as they are printed; those that are left out were not reached."""
    reached = [*lines, *["not reached"] * (len(STAGES) - len(lines))]
    return "".join(
        f"  {number} {stage:<12}  {line}\n" for number, (stage, line) in enumerate(zip(STAGES, reached, strict=True))
    )


@pytest.mark.parametrize(
    ("name", "requires", "lines", "message"),
    [
        (
            "needs_newer_core",
            ("hp-core>=0.4",),
            ["ok", "incompatible: HP201 needs hp-core>=0.4, found 0.1.0"],
            "HP201]: plugin 'needs_newer_core' (acme-needs-newer-core 2.0) needs hp-core>=0.4, found 0.1.0. "
            "fix: pip install -U hp-core",
        ),
        (
            "raises",
            (),
            ["ok", "ok", "broken: HP301 failed to import: RuntimeError: no licence"],
            "HP301]: plugin 'raises' (acme-raises 2.0) failed to import: RuntimeError: no licence. acme_raises/plugin.py:3",
        ),
        (
            "other_api",
            (),
            ["ok", "ok", "ok", "incompatible: HP312 uses plugin API 2; this hp-core speaks 1"],
            "HP312]: plugin 'other_api' uses plugin API 2; this hp-core speaks 1.",
        ),
        (
            "shadows",
            (),
            ["ok", "ok", "ok", "ok", "broken: HP402 command 'plan' is hp-core's own; expected another name"],
            "HP402]: command 'plan' is hp-core's own; expected another name. "
            "plugin 'shadows' (acme-shadows 2.0). acme_shadows/plugin.py:8",
        ),
    ],
)
def test_the_first_stage_that_fails_is_the_last_that_is_reached(
    fake_dist: FakeSite,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    requires: tuple[str, ...],
    lines: list[str],
    message: str,
) -> None:
    install(fake_dist, name, requires=requires)
    monkeypatch.setenv("HP_PLUGINS", name)
    assert main(["plugins", "check", name]) == 1
    title = f"{name} (acme-{name.replace('_', '-')} 2.0)\n"
    assert capsys.readouterr() == (title + table(*lines), f"hp: error[{message}\n")


RESOLVE = [
    (
        "no_attribute",
        "HP403",
        "family acme_norm: baseline: 'acme_no_attribute.code:Nrom' points to nothing: acme_no_attribute.code has no 'Nrom'; "
        "did you mean 'Norm'? plugin 'no_attribute' (acme-no-attribute 2.0)",
    ),
    (
        "not_a_module",
        "HP402",
        "family acme_norm: baseline 'acme_not_a_module.plugin:Norm' is the class Norm; expected a class of torch modules. "
        "plugin 'not_a_module' (acme-not-a-module 2.0)",
    ),
    (
        "other_arguments",
        "HP402",
        "family acme_norm: baseline 'acme_other_arguments.code:Norm' does not take the declared argument 'eps'; "
        "did you mean 'epsilon'?; expected epsilon. plugin 'other_arguments' (acme-other-arguments 2.0). "
        "acme_other_arguments/code.py:6. fix: take 'eps' in Norm.__init__, or do not declare it",
    ),
    (
        "no_stage",
        "HP402",
        "parallel_spec of Experts: the stage 'dispatch' is no method; expected a method (bind_parallel, forward). "
        "plugin 'no_stage' (acme-no-stage 2.0)",
    ),
    (
        "exits_late",
        "HP403",
        "command leave: main: 'acme_exits_late.code:main' fails to import: SystemExit: 5. "
        "plugin 'exits_late' (acme-exits-late 2.0). acme_exits_late/code.py:3",
    ),
    (
        "unfinished_protocol",
        "HP402",
        "protocol ep:acme: implementation 'acme_unfinished_protocol.code:Acme' lacks combine; "
        "expected every method of EPContext. plugin 'unfinished_protocol' (acme-unfinished-protocol 2.0)",
    ),
    (
        "wrong_argument",
        "HP522",
        "the layout of model.layers.0.input_layernorm names 'hidden_state' in in_src; did you mean 'hidden_states'?; "
        "expected a forward argument: hidden_states. adapter acme_moe (acme-wrong-argument 2.0), rule input_norm. "
        "fix: correct acme_wrong_argument/layout.py:8",
    ),
    (
        "misspelt_port",
        "HP522",
        "the layout of model.layers.0.input_layernorm names 'hidden' in in_src; did you mean 'hidden_states'?; "
        "expected a forward argument: hidden_states. adapter acme_moe (acme-misspelt-port 2.0), rule input_norm. "
        "fix: correct acme_misspelt_port/layout.py:8",
    ),
    (
        "wrong_parameter",
        "HP522",
        "model.layers.0.input_layernorm has no parameter 'wieght'; did you mean 'weight'?; expected one of weight. "
        "adapter acme_moe (acme-wrong-parameter 2.0), rule input_norm. fix: correct acme_wrong_parameter/layout.py:8",
    ),
    (
        "provider_raises",
        "HP402",
        "'acme_provider_raises.layout:norm' raises KeyError: 'norm_layout'. acme_provider_raises/layout.py:6. "
        "fix: repair the plugin; --debug shows the traceback",
    ),
]


@pytest.mark.parametrize(("name", "code", "message"), RESOLVE, ids=[case[0] for case in RESOLVE])
def test_stage_5_finds_what_only_the_code_can_tell(
    fake_dist: FakeSite,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    code: str,
    message: str,
) -> None:
    install(fake_dist, name)
    monkeypatch.setenv("HP_PLUGINS", f"{name},components")
    assert main(["plugins", "check", name]) == 1
    out, err = capsys.readouterr()
    assert err == f"hp: error[{code}]: {message}\n"
    assert out.splitlines()[:6] == [
        f"{name} (acme-{name.replace('_', '-')} 2.0)",
        *table("ok", "ok", "ok", "ok", "ok: 1 declaration").splitlines()[:5],
    ]
    assert out.splitlines()[6].startswith(f"  5 resolve       broken: {code} ")


def test_what_is_installed_passes_and_says_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "components", "qwen3_moe"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("  5 resolve       ok: ") == 2
    assert "                  family grouped_experts described at 8 modules of qwen3_moe\n" in out
    assert out.endswith("                  adapter qwen3_moe planned on tp=1, tp=2, tp=2 without sequence parallelism\n")


def test_a_plugin_with_nothing_wrong_passes(fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    install(fake_dist, "good")
    monkeypatch.setenv("HP_PLUGINS", "good")
    assert main(["plugins", "check", "good"]) == 0


def test_a_clash_tells_users_what_to_switch_off_and_the_author_what_to_change(
    lone_dist: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    lone_dist.add("acme-hp", version="2.0", entry="acme = acme_clash.plugin", tree=TREES / "clash_acme")
    lone_dist.add("hp-npu", version="0.1.0", entry="npu = npu_clash.plugin", tree=TREES / "clash_npu")
    assert main(["plugins", "check", "acme"]) == 1
    clash = "kernel rms_norm@npu is provided twice: npu (hp-npu 0.1.0), acme (acme-hp 2.0)"
    stages = table("ok", "ok", "ok", "ok", f"conflict: HP401 {clash}")
    note = f"  {'':<14}  or, in your own plugin: give what it declares a name that nobody has\n"
    assert capsys.readouterr() == (
        f"acme (acme-hp 2.0)\n{stages}{note}",
        f"hp: error[HP401]: {clash}. fix: HP_PLUGINS_DISABLED=acme\n",
    )


def test_all_leaves_out_what_is_switched_off_and_reports_every_fault(
    fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("raises", "unknown_hook", "needs_npu", "good"):
        install(fake_dist, name)
    monkeypatch.setenv("HP_PLUGINS", "raises,unknown_hook,needs_npu")
    assert main(["plugins", "check", "--all"]) == 1
    out, err = capsys.readouterr()
    assert "good (acme-good 2.0)\n" + table("blocked: not named by HP_PLUGINS") in out
    assert "  5 resolve       unavailable: torch_npu_that_nobody_has is not installed\n" in out
    assert err.splitlines() == [
        "hp: error[HP301]: plugin 'raises' (acme-raises 2.0) failed to import: RuntimeError: no licence. "
        "acme_raises/plugin.py:3",
        "hp: error[HP311]: plugin 'unknown_hook' implements unknown hook 'hp_familys'; did you mean 'hp_families'?",
    ]


@pytest.mark.parametrize("name", ["good", "needs_npu"])
def test_a_plugin_that_cannot_be_used_here_fails_only_if_it_is_asked_for(
    fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for tree in ("good", "needs_npu"):
        install(fake_dist, tree)
    monkeypatch.setenv("HP_PLUGINS", "needs_npu")
    assert main(["plugins", "check", "--all"]) == 0
    assert main(["plugins", "check", name]) == 1


def test_a_missing_distribution_is_an_error_only_if_the_plugin_is_asked_for(
    fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(fake_dist, "needs_distribution", requires=("acme-nobody-has",))
    monkeypatch.setenv("HP_PLUGINS", "needs_distribution")
    assert main(["plugins", "check", "--all"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["plugins", "check", "acme-needs-distribution"]) == 1
    assert capsys.readouterr().err == (
        "hp: error[HP202]: plugin 'needs_distribution' (acme-needs-distribution 2.0) needs acme-nobody-has, "
        "which is not installed. fix: pip install acme-nobody-has\n"
    )


def test_slow_declarations_are_pointed_out(
    fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(fake_dist, "sleeps")
    monkeypatch.setenv("HP_PLUGINS", "sleeps")
    monkeypatch.setattr(checking, "SLOW_S", 0.1)
    assert main(["plugins", "check", "sleeps"]) == 0
    assert "  2 import        ok, but slow: more than 0.1 s, and every hp command waits for it\n" in capsys.readouterr().out


def test_debug_shows_where_the_plugin_failed(
    fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(fake_dist, "provider_raises")
    monkeypatch.setenv("HP_PLUGINS", "provider_raises,components")
    assert main(["plugins", "check", "provider_raises", "--debug"]) == 1
    err = capsys.readouterr().err
    assert 'acme_provider_raises/layout.py", line 6, in norm' in err
    assert "KeyError: 'norm_layout'" in err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "one of the arguments NAME --all is required"),
        (["good", "--all"], "argument --all: not allowed with argument NAME"),
    ],
)
def test_a_command_line_that_cannot_be_understood_is_exit_code_2(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plugins", "check", *argv])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"hp plugins check: error: {problem}"


def test_an_unknown_name_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "qwen3_mo"]) == 1
    assert capsys.readouterr().err == (
        "hp: error[HP102]: hp plugins check names 'qwen3_mo', but no plugin of that name is installed; "
        "did you mean 'qwen3_moe'?\n"
    )
