"""Plugins: names are found, unique over all plugins, and a wrong one says what to do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hp_core.contracts import (
    Command,
    Kernel,
    ModelAdapter,
    ModuleFamily,
    PrecisionScheme,
    Problem,
    Protocol,
    RecipeSection,
    hookimpl,
)
from hp_core.errors import HPError, PlanError
from hp_core.plugins.load import load_plugins, plugins_from, without
from hp_core.plugins.plugins import Plugins
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"


def namespace(name: str = "acme_hp.plugin", **hooks: Any) -> SimpleNamespace:
    """Return a plugin whose hooks return the given values; a function is taken as the hook itself."""
    functions = {hook: value if callable(value) else _returning(value) for hook, value in hooks.items()}
    return SimpleNamespace(__name__=name, HP_API=1, **{hook: hookimpl(function) for hook, function in functions.items()})


def _returning(value: Any) -> Any:
    def hook() -> Any:
        return value

    return hook


def adapter(name: str = "acme", **fields: Any) -> ModelAdapter:
    """Return an adapter with the least that is legal."""
    return ModelAdapter(name=name, model_class="acme_hp.model:Model", config_class="acme_hp.model:Config", **fields)


ACME = namespace(
    hp_adapters=[adapter(hf_model_types=["acme_moe"], architectures=["AcmeForCausalLM"])],
    hp_families=[ModuleFamily(name="acme_norm", baseline="acme_hp.norm:Norm")],
    hp_protocols=[Protocol(kind="cp", name="ring", implementation="acme_hp.ring:Ring")],
    hp_kernels=[Kernel(op="rms_norm", name="fast", device="cpu", implementation="acme_hp.norm:fast")],
    hp_schemes=[PrecisionScheme(name="mixed", compute="bfloat16")],
    hp_sections=[RecipeSection(name="acme", schema="acme_hp.recipe:Acme")],
    hp_commands=[Command(name="acme", help="Do it", main="acme_hp.command:main")],
)


def message(error: pytest.ExceptionInfo[HPError]) -> str:
    """Return the line that a command would print."""
    return error.value.line


def test_every_kind_of_declaration_is_found_by_its_name() -> None:
    plugins = plugins_from(ACME)
    assert plugins.adapter("acme") is plugins.adapter("acme_moe") is plugins.adapter("AcmeForCausalLM")
    assert plugins.family("acme_norm").baseline == "acme_hp.norm:Norm"
    assert plugins.protocol("cp", "ring").implementation == "acme_hp.ring:Ring"
    assert plugins.scheme("mixed").compute == "bfloat16"
    assert plugins.kernels["rms_norm:fast"].declaration.device == "cpu"
    section = plugins.section("acme")
    assert section is not None
    assert section.schema == "acme_hp.recipe:Acme"
    assert plugins.commands["acme"].declaration.help == "Do it"


def test_a_record_lists_what_the_plugin_provides() -> None:
    (record,) = plugins_from(ACME).records
    assert (record.name, record.distribution, record.api, record.status) == ("acme_hp", "acme-hp", 1, "ok")
    assert record.provides == (
        "adapter acme",
        "command acme",
        "family acme_norm",
        "kernel rms_norm@fast",
        "protocol cp:ring",
        "scheme mixed",
        "section acme",
    )


def test_the_owner_of_a_name_is_its_plugin() -> None:
    plugins = plugins_from(ACME)
    for kind, key in [("adapter", "acme_moe"), ("family", "acme_norm"), ("kernel", "rms_norm:fast"), ("protocol", "cp:ring")]:
        assert plugins.owner(kind, key) is plugins.records[0]


@pytest.mark.parametrize(
    ("kind", "name", "line"),
    [
        ("adapter", "acme_mo", "no installed plugin provides the adapter 'acme_mo'; did you mean 'acme_moe'?"),
        (
            "adapter",
            "zzz",
            "no installed plugin provides the adapter 'zzz'. fix: hp plugins list --kind adapter shows what there is",
        ),
        ("family", "acme_nrm", "no installed plugin provides the family 'acme_nrm'; did you mean 'acme_norm'?"),
        ("scheme", "mixd", "no installed plugin provides the scheme 'mixd'; did you mean 'mixed'?"),
        ("protocol", "cp:rng", "no installed plugin provides the protocol 'cp:rng'; did you mean 'cp:ring'?"),
        ("adapter", "qwen3_moe", "no installed plugin provides the adapter 'qwen3_moe'. fix: pip install hp-qwen3-moe"),
        ("adapter", "qwen3_mo", "no installed plugin provides the adapter 'qwen3_mo'; did you mean 'qwen3_moe'?"),
        ("kernel", "zzz", "no installed plugin provides the kernel 'zzz'. fix: hp kernels list shows what there is"),
        (
            "family",
            "grouped_experts",
            "no installed plugin provides the family 'grouped_experts'. fix: pip install hp-components",
        ),
    ],
)
def test_a_name_that_nobody_provides_says_what_to_do(kind: str, name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_core.plugins.missing.unreleased", lambda: {"hp-deepseek": "DeepSeek-V3"})
    with pytest.raises(HPError) as caught:
        plugins_from(ACME).provided(kind, name)
    assert message(caught) == f"hp: error[HP101]: {line}"


def test_what_is_not_released_yet_has_no_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hp_core.plugins.missing.unreleased", lambda: {"hp-qwen3-moe": "a model"})
    with pytest.raises(HPError) as caught:
        plugins_from(ACME).provided("adapter", "qwen3_moe")
    what = "no installed plugin provides the adapter 'qwen3_moe'; hp-qwen3-moe, which will, is not released yet"
    assert message(caught) == f"hp: error[HP101]: {what}"


def test_a_missing_name_says_where_it_was_asked_for() -> None:
    with pytest.raises(HPError) as caught:
        plugins_from().adapter("acme", where="recipe.yaml:2")
    assert message(caught) == (
        "hp: error[HP101]: no installed plugin provides the adapter 'acme'. recipe.yaml:2. "
        "fix: hp plugins list shows what is installed"
    )


def test_a_section_of_a_plugin_that_is_not_installed_has_a_pip_line() -> None:
    with pytest.raises(HPError) as caught:
        plugins_from(ACME).section("train", where="recipe.yaml:7")
    assert message(caught) == (
        "hp: error[HP104]: the recipe section 'train' belongs to hp-trainer, which is not installed. recipe.yaml:7. "
        "fix: pip install hp-trainer"
    )


def test_a_section_of_a_blocked_plugin_says_why() -> None:
    plugins = without(plugins_from(ACME), ["acme_hp"], source="-p")
    with pytest.raises(HPError) as caught:
        plugins.section("acme")
    assert message(caught) == (
        "hp: error[HP104]: the recipe section 'acme' belongs to plugin 'acme_hp' (acme-hp 0), which is blocked: disabled by "
        "-p. fix: leave out -p no:acme_hp"
    )


def test_a_section_that_nobody_owns_is_none() -> None:
    assert plugins_from(ACME).section("trian") is None


@pytest.mark.parametrize(
    ("hooks", "line"),
    [
        (
            {"hp_families": [ModuleFamily(name="acme_norm", baseline="b:C")]},
            "family acme_norm is provided twice: acme_hp (acme-hp 0), other_hp (other-hp 0). fix: HP_PLUGINS_DISABLED=other_hp",
        ),
        (
            {"hp_adapters": [adapter("other", hf_model_types=["acme_moe"])]},
            "adapter acme_moe is provided twice: acme_hp (acme-hp 0), other_hp (other-hp 0). fix: HP_PLUGINS_DISABLED=other_hp",
        ),
        (
            {"hp_commands": [Command(name="acme", help="Other", main="b:c")]},
            "command acme is provided twice: acme_hp (acme-hp 0), other_hp (other-hp 0). fix: HP_PLUGINS_DISABLED=other_hp",
        ),
        (
            {"hp_sections": [RecipeSection(name="two", schema="b:C"), RecipeSection(name="two", schema="b:D")]},
            "section two is provided twice by plugin 'other_hp' (other-hp 0). fix: give one of the two sections another name",
        ),
    ],
)
def test_a_name_is_unique_over_all_plugins(hooks: dict[str, Any], line: str) -> None:
    with pytest.raises(HPError) as caught:
        plugins_from(ACME, namespace("other_hp.plugin", **hooks))
    assert message(caught) == f"hp: error[HP401]: {line}"


def clashing(site: FakeSite) -> Plugins:
    """Install two plugins that declare the same kernel, and load them."""
    site.add("acme-hp", version="2.0", entry="acme = acme_clash.plugin", tree=TREES / "clash_acme")
    site.add("hp-npu", version="0.1.0", entry="npu = npu_clash.plugin", tree=TREES / "clash_npu")
    return load_plugins(environ={"HP_PLUGINS": "acme,npu"})


def test_a_clash_marks_both_owners_and_names_them(lone_dist: FakeSite) -> None:
    records = {record.name: record for record in clashing(lone_dist).records}
    expected = (
        "hp: error[HP401]: kernel rms_norm@npu is provided twice: npu (hp-npu 0.1.0), acme (acme-hp 2.0). "
        "fix: HP_PLUGINS_DISABLED=acme"
    )
    for name in ("npu", "acme"):
        error = records[name].error
        assert (records[name].status, records[name].code, error and error.line) == ("conflict", "HP401", expected)


def test_a_clash_withholds_the_name_and_nothing_else(lone_dist: FakeSite) -> None:
    plugins = clashing(lone_dist)
    assert sorted(plugins.kernels) == ["swiglu:acme", "swiglu:npu"]
    with pytest.raises(HPError) as caught:
        plugins.provided("kernel", "rms_norm:npu")
    assert caught.value.code == "HP401"


def test_a_clash_ends_when_one_owner_is_switched_off(lone_dist: FakeSite) -> None:
    plugins = without(clashing(lone_dist), ["acme"], source="-p")
    assert plugins.owner("kernel", "rms_norm:npu").distribution == "hp-npu"
    assert {r.name: r.status for r in plugins.records if r.name in ("npu", "acme")} == {"npu": "ok", "acme": "blocked"}


def _no_problem() -> list[Problem]:
    return []


def _one_problem(plan: Any) -> list[Problem]:
    return [Problem(what=f"{plan} is too big", expected="4 GB", where="lm_head", fix="set mesh.tp")]


def _failing(plan: Any) -> list[Problem]:
    raise KeyError("size")


def _garbage(plan: Any) -> Any:
    return "fine"


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (
            _one_problem,
            "hp: error[HP528]: plugin 'acme_hp' (acme-hp 0) refuses the plan: PLAN is too big; expected 4 GB. lm_head. "
            "fix: set mesh.tp",
        ),
        (
            _failing,
            "hp: error[HP303]: plugin 'acme_hp' (acme-hp 0): hp_check_plan raises KeyError: 'size'. "
            f"tests/hp_core/plugins/test_plugins.py:{_failing.__code__.co_firstlineno + 1}. fix: HP_PLUGINS_DISABLED=acme_hp",
        ),
        (
            _garbage,
            "hp: error[HP303]: plugin 'acme_hp' (acme-hp 0): hp_check_plan returns 'fine'; expected a list of Problem. "
            "fix: HP_PLUGINS_DISABLED=acme_hp",
        ),
    ],
)
def test_the_first_problem_of_a_plan_check_is_an_error(check: Any, line: str) -> None:
    plugins = plugins_from(namespace(hp_check_plan=check))
    with pytest.raises(HPError) as caught:
        plugins.check_plan("PLAN")  # type: ignore[arg-type]
    assert message(caught) == line


def test_a_plan_check_may_keep_silent_and_need_not_look() -> None:
    plugins_from(namespace(hp_check_plan=_no_problem)).check_plan("PLAN")  # type: ignore[arg-type]


def test_a_problem_with_its_own_code_keeps_it() -> None:
    def check(plan: Any) -> list[Problem]:
        return [Problem(what="heads (6) must be divisible by tp (4)", code="HP502")]

    with pytest.raises(PlanError) as caught:
        plugins_from(namespace(hp_check_plan=check)).check_plan("PLAN")  # type: ignore[arg-type]
    assert caught.value.code == "HP502"


def test_the_digest_is_a_sorted_list_and_its_hash() -> None:
    plugins = plugins_from(namespace("zeta.plugin"), namespace("alpha.plugin"))
    lines, digest = plugins.digest()
    assert lines == ["alpha 0 alpha", "zeta 0 zeta"]
    assert digest == "3631267153b18a4b47329d113cb10b9053de1037dabc537b367b321be9a4060c"
    assert without(plugins, ["zeta"], source="-p").digest()[0] == ["alpha 0 alpha"]


def test_a_namespace_with_a_mistake_is_refused_at_once() -> None:
    with pytest.raises(HPError) as caught:
        plugins_from(SimpleNamespace(__name__="acme_hp.plugin", HP_API=3))
    assert message(caught) == "hp: error[HP312]: plugin 'acme_hp' uses plugin API 3; this hp-core speaks 1."


def test_no_plugins_are_legal() -> None:
    assert plugins_from().records == ()
