"""Which kernel computes what: explicit, automatic, by pattern, and every refusal in its words."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from hp_core.contracts import Kernel, KernelPlan, SelectorSpec, VariantRule
from hp_core.errors import HPError
from hp_core.planner.report import kernels as table
from hp_core.planner.serialise import plan_from_json, plan_to_json


def kernel(name: str, device: str = "cpu", **fields: Any) -> Kernel:
    return Kernel(op="swiglu", name=name, device=device, implementation=f"toy:{name}", **fields)


COMMON, OWN, NPU = kernel("common", "any"), kernel("own"), kernel("npu", "npu", requires=["torch_npu"])
PLAIN = kernel("plain", "any", automatic=False)
SHORT = kernel("short", condition="toy_layouts:short")
ALL = (COMMON, OWN, NPU, PLAIN)


@pytest.fixture
def planned(make_plan, toy, layouts):
    """Return a function that plans the toy, whose two mlps and embedding are one family that computes ``swiglu``."""
    family = attrs.evolve(toy.TABLE, kernels=("swiglu",), sharding=None)
    inventory = toy.inventory
    for fqn in ("layers.0.mlp", "layers.1.mlp"):
        inventory = toy.with_module(inventory, fqn, family="table")
    inventory = toy.with_module(inventory, "embed", family=None, cls="toy:Embedding")
    inventory = attrs.evolve(inventory, replacements=[])
    layouts.short = lambda facts: facts["sequence"] <= 64 and facts["attributes"]["width"] == 16
    layouts.never = lambda facts: False

    def make(kernels: Any = "auto", *, provided: tuple[Kernel, ...] = ALL, **keys: Any):
        return make_plan(inventory=inventory, keys={"kernels": kernels, **keys}, kernels=provided, family=family)

    return make


def chosen(plan) -> dict[str, tuple[str, str]]:
    return {entry.fqn: (entry.name, entry.reason) for entry in plan.kernels}


def both(name: str, reason: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(("layers.0.mlp", "layers.1.mlp"), (name, reason))


def refusal(planned, *args: Any, **keys: Any) -> str:
    with pytest.raises(HPError) as caught:
        planned(*args, **keys)
    return str(caught.value)


def test_auto_takes_the_devices_own_kernel(planned):
    assert chosen(planned()) == both("own", "auto: for cpu")


def test_auto_takes_one_for_any_device_where_the_device_has_none(planned):
    assert chosen(planned(device="cuda")) == both("common", "auto: for any device")


def test_a_condition_decides_by_shapes(planned, layouts):
    plan = planned(provided=(COMMON, SHORT))
    assert chosen(plan) == both("common", "auto: for any device; short does not apply (toy_layouts:short)")
    layouts.short = lambda facts: facts["fqn"] == "layers.1.mlp"
    assert chosen(planned(provided=(COMMON, SHORT)))["layers.1.mlp"] == ("short", "auto: for cpu")


def test_a_member_may_compute_other_operators_than_its_family(make_plan, toy):
    family = attrs.evolve(
        toy.TABLE,
        kernels=("swiglu",),
        selectors={"kind": SelectorSpec(choices=("one", "other"), default="one")},
        variants={"other": "toy:Other"},
        rules=[VariantRule(when={"kind": "other"}, variant="other")],
        variant_kernels={"other": ("rms_norm",)},
    )
    common = (COMMON, attrs.evolve(COMMON, op="rms_norm"))
    (record,) = toy.inventory.replacements
    for variant, op in (("baseline", "swiglu"), ("other", "rms_norm")):
        inventory = attrs.evolve(toy.inventory, replacements=[attrs.evolve(record, variant=variant)])
        plan = make_plan(inventory=inventory, family=family, kernels=common)
        assert [(entry.fqn, entry.op) for entry in plan.kernels] == [("embed", op)]
        unused = "rms_norm" if op == "swiglu" else "swiglu"
        with pytest.raises(HPError) as caught:
            make_plan(inventory=inventory, family=family, kernels=common, keys={"kernels": {unused: "common"}})
        assert caught.value.code == "HP527"


def test_attention_of_the_models_own_class_takes_a_kernel_where_there_is_one(make_plan, toy):
    rules = [attrs.evolve(rule, role="attention") if rule.name == "mlp" else rule for rule in toy.RULES]
    adapter = attrs.evolve(toy.ADAPTER, layout=rules)
    own = attrs.evolve(OWN, op="attention")
    assert chosen(make_plan(adapter=adapter, kernels=(own,))) == both("own", "auto: for cpu")
    assert chosen(make_plan(adapter=adapter)) == {}
    assert chosen(make_plan(adapter=adapter, kernels=(attrs.evolve(own, automatic=False),))) == {}
    with pytest.raises(HPError) as caught:
        make_plan(adapter=adapter, keys={"kernels": {"attention": "own"}})
    assert caught.value.code == "HP101"


def test_a_named_kernel_is_taken(planned):
    assert chosen(planned({"swiglu": "plain"})) == both("plain", "kernels.swiglu")


def test_patterns_choose_layer_by_layer_and_the_first_match_wins(planned):
    plan = planned({"swiglu": {"layers.0.*": "plain", "layers.*": "common"}})
    assert chosen(plan) == {
        "layers.0.mlp": ("plain", "kernels.swiglu of layers.0.*"),
        "layers.1.mlp": ("common", "kernels.swiglu of layers.*"),
    }


def test_what_no_pattern_matches_is_automatic_and_so_is_auto(planned):
    assert chosen(planned({"swiglu": {"layers.0.*": "plain"}}))["layers.1.mlp"] == ("own", "auto: for cpu")
    assert chosen(planned({"swiglu": "auto"})) == both("own", "auto: for cpu")


def test_a_plan_for_a_device_that_is_not_here_can_be_made(planned, make_recipe):
    """Availability is the applier's question: the plan only records what the kernel requires."""
    from hp_core.planner.kernels import choose_kernel

    facts = {"fqn": "layers.0.mlp", "device": "npu"}
    recipe = make_recipe(kernels=ALL)
    assert choose_kernel("swiglu", None, facts=facts, recipe=recipe) == KernelPlan(
        fqn="layers.0.mlp",
        op="swiglu",
        name="npu",
        device="npu",
        implementation="toy:npu",
        requires=["torch_npu"],
        reason="auto: for npu",
    )


def test_the_choice_is_printed_and_survives_json(planned):
    plan = planned({"swiglu": {"layers.0.*": "plain"}})
    assert table(plan).rows == (
        ("layers.0.mlp", "swiglu", "plain", "kernels.swiglu of layers.0.*"),
        ("layers.1.mlp", "swiglu", "own", "auto: for cpu"),
    )
    assert plan_from_json(plan_to_json(plan)) == plan


REFUSED = {
    "a kernel that nobody provides": (
        {"swiglu": "plian"},
        "HP101: no installed plugin provides the kernel 'swiglu:plian'; did you mean 'swiglu:plain'?",
    ),
    "an operator that does not exist": (
        {"swigl": "plain"},
        "HP514: kernels names the operator 'swigl'; did you mean 'swiglu'?; expected one of rms_norm, rotary, attention, "
        "attention_with_lse, grouped_matmul, swiglu, topk_gating, moe_permute, moe_unpermute, vocab_parallel_cross_entropy, "
        "embedding",
    ),
    "a kernel of another device": (
        {"swiglu": "npu"},
        "HP570: the kernel swiglu@npu is for npu, the recipe's device is cpu; expected a kernel for cpu. "
        "fix: one of common, own, plain",
    ),
    "an operator that nothing computes": (
        {"rotary": "plain"},
        "HP527: kernels names rotary, but no component of the model computes it through a kernel; expected an operator in use. "
        "fix: replace the modules by a component that does (hp families list), or leave the key out",
    ),
    "a pattern that hits nothing": (
        {"swiglu": {"layer.*": "plain"}},
        "HP527: no component that computes swiglu matches 'layer.*', or an earlier pattern takes it; "
        "expected a module such as layers.0.mlp",
    ),
}


@pytest.mark.parametrize(("kernels", "text"), REFUSED.values(), ids=REFUSED)
def test_a_wish_that_cannot_be_met_is_an_error(planned, kernels, text):
    what, _, fix = text.partition(" fix: ")
    place = f"{what.removesuffix('.')}{'' if what.endswith('?') else '.'} recipe: kernels.{next(iter(kernels))}"
    assert refusal(planned, kernels) == (f"{place}. fix: {fix}" if fix else place)


def test_a_condition_that_is_false_is_an_error_for_a_named_kernel(planned):
    assert refusal(planned, {"swiglu": "short"}, provided=(COMMON, SHORT)) == (
        "HP570: the kernel swiglu@short does not apply to layers.0.mlp: its condition toy_layouts:short is false; "
        "expected a kernel that applies. recipe: kernels.swiglu. "
        "fix: one of common, short, for the modules it does not apply to"
    )


def test_auto_never_chooses_between_equals(planned):
    assert refusal(planned, provided=(OWN, kernel("other"), COMMON)) == (
        "HP570: auto finds several kernels of swiglu for layers.0.mlp on cpu: other, own; expected one. recipe: kernels. "
        "fix: kernels: {swiglu: NAME}"
    )


def test_auto_takes_the_most_preferred_of_those_that_apply(planned):
    built_in = kernel("built_in", preference=-1)
    assert chosen(planned(provided=(OWN, built_in, COMMON))) == both("own", "auto: for cpu")
    assert chosen(planned(provided=(built_in, COMMON))) == both("built_in", "auto: for cpu")
    assert chosen(planned(provided=(attrs.evolve(SHORT, condition="toy_layouts:never", preference=1), built_in))) == both(
        "built_in", "auto: for cpu; short does not apply (toy_layouts:never)"
    )


def test_auto_without_a_kernel_is_an_error(planned):
    assert refusal(planned, provided=(NPU, PLAIN)) == (
        "HP570: auto finds no kernel of swiglu for layers.0.mlp on cpu; expected a plugin that provides one. recipe: kernels"
    )
