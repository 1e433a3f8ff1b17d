"""Modules that communicate by themselves: a toy with experts in layer 0, and every way to declare it wrongly, word for word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from hp_core.contracts import (
    Inventory,
    LayoutRule,
    ModuleInfo,
    ModuleShardingSpec,
    NativeParallelBindingRequest,
    ParallelModuleSpec,
    Problem,
    Protocol,
    Replicate,
    Shard,
    TensorInfo,
)
from hp_core.errors import HPError
from hp_core.mesh.topology import Topology
from hp_core.planner.explain import explain
from hp_core.planner.report import headline

EP2 = Topology(dp_shard=2, ep=2)
EXPERTS = "layers.0.mlp"
METHODS = {"forward": ("x",), "bind_parallel": ("binding",)}
CARRIER = Protocol(kind="ep", name="dedup", implementation="toy_layouts:Carrier")
WHERE = "adapter toy (toy 0), rule experts"


def spec(**fields: Any) -> ParallelModuleSpec:
    """Return how the experts communicate."""
    given = {"protocol": "toy", "binding_kind": "ep", "options": {"num_experts": 4}, "validate": "toy_layouts:accept"}
    return ParallelModuleSpec(**{**given, **fields})


def layout(info: ModuleInfo, ctx: Any) -> ModuleShardingSpec:
    """Cut the experts over ep; tokens stay where they are."""
    return ModuleShardingSpec(
        params={path: {"ep": Shard(0)} for path in info.parameters},
        in_src={"x": ctx.residual},
        out_src={"output": ctx.residual},
    )


@pytest.fixture
def experts(toy: Any, layouts: Any) -> Callable[..., Inventory]:
    """Return a function that makes the toy's inventory with experts in layer 0, with fields of theirs changed."""
    layouts.experts, layouts.accept = layout, lambda info, sharding, context: []
    layouts.counts = lambda config: {"embed": 1, "norm": 2, "mlp": 1, "head": 1, "experts": 1}

    def make(**changes: Any) -> Inventory:
        given = {
            "cls": "toy:Experts",
            "forward_args": ("x",),
            "methods": METHODS,
            "parameters": {"weight": TensorInfo(shape=(4, 6, 8), dtype="float32")},
            "attributes": {},
            "parallel": spec(),
        }
        modules = [info for info in toy.inventory.modules if not info.fqn.startswith(f"{EXPERTS}.")]
        return toy.with_module(attrs.evolve(toy.inventory, modules=modules), EXPERTS, **{**given, **changes})

    return make


@pytest.fixture
def adapter(toy: Any) -> Any:
    """The toy's adapter, which knows experts and speaks any protocol over ep."""
    rule = LayoutRule(name="experts", module_class="Experts", match="layers.*.mlp", provider="toy_layouts:experts")
    return attrs.evolve(toy.ADAPTER, layout=[*toy.RULES, rule], experts=[EXPERTS], protocols=["ep:*"])


@pytest.fixture
def planned(make_plan: Any, experts: Any, adapter: Any) -> Callable[..., Any]:
    """Return a function that plans the toy with experts."""

    def make(topology: Topology = EP2, *, inventory: Inventory | None = None, **keywords: Any) -> Any:
        given = {"adapter": adapter, "protocols": (CARRIER,), **keywords}
        return make_plan(topology, inventory=inventory or experts(), **given)

    return make


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(HPError) as caught:
        action()
    return str(caught.value)


def test_experts_that_keep_their_contract_are_planned(planned: Any) -> None:
    plan = planned()
    (protocol,) = plan.protocols
    assert (protocol.kind, protocol.name, protocol.implementation) == ("ep", "dedup", "toy_layouts:Carrier")
    (parameter,) = (entry for entry in plan.parameters if entry.owner == EXPERTS)
    assert parameter.layout == parameter.gradient == {"ep": Shard(0)}
    assert [(unit.fqn, unit.view) for unit in plan.units if unit.view == "expert"] == [(EXPERTS, "expert")]


def test_a_reader_is_told_the_protocol_and_why_expert_gradients_are_whole(planned: Any, adapter: Any) -> None:
    plan = planned()
    known = attrs.evolve(plan, config={**plan.config, "num_experts_per_tok": 2})
    assert "protocols: ep by dedup" in headline(known, adapter=adapter)
    assert "  binding: toy, ep by dedup" in explain(plan, EXPERTS)
    because = "  gradient: ep=Shard(0), because its experts see all tokens of the ep group that chose them"
    assert because in explain(plan, f"{EXPERTS}.weight")
    without = attrs.evolve(known, protocols=())
    assert not [line for line in headline(without, adapter=adapter) if line.startswith("protocols")]


def test_on_a_mesh_without_ep_no_protocol_is_planned_nor_needed(planned: Any) -> None:
    assert planned(Topology(dp_shard=2), protocols=()).protocols == ()


def changed(**fields: Any) -> Any:
    """Return the experts' spec with fields changed, as a change of the module."""
    return {"parallel": spec(**fields)}


WRONG_CLASSES = [
    (
        changed(stages={"dispatch": ("x",)}),
        "HP402: parallel_spec of Experts: the stage 'dispatch' is no method; expected a method (bind_parallel, forward)",
    ),
    (
        changed(stages={"forward": ("hidden",)}),
        "HP402: parallel_spec of Experts: the stage 'forward' does not take 'hidden'; expected x",
    ),
    (
        {"methods": {"forward": ("x",)}},
        "HP402: parallel_spec of Experts: binding_kind is 'ep'; expected a method bind_parallel(binding)",
    ),
    (
        {"methods": {**METHODS, "bind_parallel": ("mesh",)}},
        "HP402: parallel_spec of Experts: binding_kind is 'ep'; expected a method bind_parallel(binding)",
    ),
    (
        changed(options={}),
        "HP402: parallel_spec of Experts: options['num_experts'] is None; expected an integer, 1 or more",
    ),
    (
        changed(validate=None),
        "HP402: parallel_spec of Experts: binding_kind is 'ep' and validate is None; expected a validate reference",
    ),
    ({"parallel": {"protocol": "toy"}}, "HP402: parallel_spec of Experts is a dict; expected a ParallelModuleSpec"),
    (
        changed(options={"num_experts": 3}),
        f"HP502: the number of experts of {EXPERTS} (3) must be divisible by ep (2). recipe, mesh: dp_replicate=1 dp_shard=2 "
        "pp=1 cp=1 tp=1 ep=2. fix: set mesh.ep to 1 or 3",
    ),
    (
        {"parameters": {"weight": TensorInfo(shape=(8, 6, 8), dtype="float32")}},
        f"HP581: {EXPERTS}: weight is Shard(0) on ep and dim 0 is 8; expected Shard(0) of 4 experts. {WHERE}",
    ),
]


@pytest.mark.parametrize(("changes", "text"), WRONG_CLASSES, ids=range(len(WRONG_CLASSES)))
def test_a_class_that_does_not_keep_its_contract_is_refused(changes: Any, text: str, planned: Any, experts: Any) -> None:
    assert refusal(lambda: planned(inventory=experts(**changes))) == text


WRONG_LAYOUTS = [
    (
        {"weight": {"tp": Replicate()}},
        f"HP581: {EXPERTS} communicates over ep (2), but none of its parameters is cut over ep; "
        f"expected Shard(0) on ep for those that hold experts. {WHERE}",
    ),
    (
        {"weight": {"ep": Shard(1)}},
        f"HP581: {EXPERTS}: weight is Shard(1) on ep and dim 0 is 4; expected Shard(0) of 4 experts. {WHERE}",
    ),
    (
        {"weight": {"ep": Replicate()}},
        f"HP581: {EXPERTS}: weight is Replicate on ep and dim 0 is 4; expected Shard(0) of 4 experts. {WHERE}",
    ),
]


@pytest.mark.parametrize(("params", "text"), WRONG_LAYOUTS, ids=range(len(WRONG_LAYOUTS)))
def test_experts_are_cut_by_whole_experts(params: Any, text: str, planned: Any, layouts: Any) -> None:
    layouts.experts = lambda info, ctx: attrs.evolve(layout(info, ctx), params=params)
    assert refusal(planned) == text


def test_what_validate_finds_is_told_before_anything_changes(planned: Any, layouts: Any) -> None:
    layouts.accept = lambda info, sharding, context: [Problem(what="weight is odd", expected="even", fix="turn it")]
    assert refusal(planned) == f"HP522: weight is odd; expected even. {EXPERTS}. fix: turn it"


def nested(toy: Any, inventory: Inventory, kind: str) -> Inventory:
    """Put a module that communicates into the experts."""
    inner = toy.module(
        f"{EXPERTS}.inner",
        "Inner",
        forward_args=("x",),
        methods=METHODS,
        parallel=spec(binding_kind=kind),
        parameters={"weight": TensorInfo(shape=(4, 8), dtype="float32")},
    )
    found = list(inventory.modules)
    place = [info.fqn for info in found].index(EXPERTS) + 1
    return attrs.evolve(inventory, modules=[*found[:place], inner, *found[place:]])


def with_inner(toy: Any, adapter: Any, layouts: Any, params: Any) -> Any:
    """Let the adapter know the inner module."""
    layouts.inner = lambda info, ctx: ModuleShardingSpec(params={"weight": params}, is_boundary=False)
    layouts.counts = lambda config: {"embed": 1, "norm": 2, "mlp": 1, "head": 1, "experts": 1, "inner": 1}
    rule = LayoutRule(name="inner", module_class="Inner", match="*.inner", provider="toy_layouts:inner")
    return attrs.evolve(adapter, layout=[*adapter.layout, rule], protocols=["ep:*", "cp:*"])


@pytest.mark.parametrize("kind", ["ep", "mesh"])
def test_two_owners_are_not_nested(kind: str, planned: Any, experts: Any, toy: Any, adapter: Any, layouts: Any) -> None:
    inventory = nested(toy, experts(), kind)
    knowing = with_inner(toy, adapter, layouts, {"ep": Shard(0)})
    assert refusal(lambda: planned(inventory=inventory, adapter=knowing)) == (
        f"HP581: {EXPERTS}.inner (kind {kind}) lies in {EXPERTS} (kind ep), and both communicate; "
        "expected one owner; only cp and ep may lie in each other. adapter toy (toy 0), rule inner"
    )


@pytest.mark.parametrize("kind", ["cp", "none"])
def test_cp_inside_ep_is_fine(kind: str, planned: Any, experts: Any, toy: Any, adapter: Any, layouts: Any) -> None:
    inventory = nested(toy, experts(), kind)
    knowing = with_inner(toy, adapter, layouts, {"tp": Replicate()})
    found = {entry.fqn: entry.parallel for entry in planned(inventory=inventory, adapter=knowing).boundaries}
    assert found[f"{EXPERTS}.inner"].binding_kind == kind


def native(*match: str, sharding: ModuleShardingSpec | None = None) -> NativeParallelBindingRequest:
    return NativeParallelBindingRequest(match=match, parallel=spec(binding_kind="mesh"), sharding=sharding)


PLAIN = ModuleShardingSpec(params={"weight": {"tp": Replicate()}}, is_boundary=False)


def test_a_class_of_the_model_itself_is_bound_by_the_adapter_and_needs_no_method(planned: Any, adapter: Any) -> None:
    binding = attrs.evolve(adapter, bindings=[native("layers.*.norm", "head")])
    found = {entry.fqn for entry in planned(adapter=binding).boundaries if entry.parallel is not None}
    assert found == {"layers.0.norm", "layers.1.norm", "head", EXPERTS}


def test_a_component_that_has_taken_such_a_module_s_place_is_left_to_itself(planned: Any, adapter: Any) -> None:
    found = planned(adapter=attrs.evolve(adapter, bindings=[native("embed", sharding=PLAIN)]))
    assert {entry.fqn for entry in found.boundaries if entry.parallel is not None} == {EXPERTS}


WRONG_BINDINGS = [
    ([native("layers.*.nrom")], "HP527: the binding pattern 'layers.*.nrom' matches no module. adapter toy"),
    (
        [native("head"), native("hea*")],
        "HP581: a binding hits head, which communicates by toy already; expected one owner. adapter toy",
    ),
    (
        [native("head", "hea*")],
        "HP581: a binding hits head, which communicates by toy already; expected one owner. adapter toy",
    ),
    (
        [native("layers.0")],
        "HP581: a binding hits layers.0, which has no layout; "
        "expected a layout in the request, or a layout rule for its class. adapter toy",
    ),
]


@pytest.mark.parametrize(("bindings", "text"), WRONG_BINDINGS, ids=range(len(WRONG_BINDINGS)))
def test_a_binding_that_does_not_fit_the_model_is_refused(bindings: Any, text: str, planned: Any, adapter: Any) -> None:
    assert refusal(lambda: planned(adapter=attrs.evolve(adapter, bindings=bindings))) == text


def test_a_binding_lies_in_no_component(planned: Any, experts: Any, toy: Any, adapter: Any) -> None:
    inside = toy.module("embed.core", "Core", parameters={})
    found = [*experts().modules]
    found.insert(2, inside)
    inventory = attrs.evolve(experts(), modules=found)
    assert refusal(
        lambda: planned(inventory=inventory, adapter=attrs.evolve(adapter, bindings=[native("embed.*", sharding=PLAIN)]))
    ) == (
        "HP581: a binding hits embed.core, which lies in the component table at embed; "
        "expected a module of the model's own classes. adapter toy"
    )


def test_a_protocol_that_nobody_provides_is_told_with_what_to_install(planned: Any) -> None:
    assert refusal(lambda: planned(protocols=())) == (
        "HP101: no installed plugin provides the protocol 'ep:dedup'. recipe. fix: pip install hp-expert-parallel"
    )


def carrier(**changes: Any) -> dict[str, Any]:
    return {"protocols": (attrs.evolve(CARRIER, **changes),)}


WRONG_PROTOCOLS = [
    (
        carrier(version=2),
        f"HP580: protocol ep:dedup has version 2; expected 1, which {EXPERTS} speaks. {WHERE}",
    ),
    (
        carrier(backends=["nccl"]),
        "HP580: protocol ep:dedup does not work on gloo (cpu); expected nccl. recipe",
    ),
    (
        carrier(validate="toy_layouts:too_few"),
        "HP580: ep is too small; expected 8. recipe. fix: take more",
    ),
]


@pytest.mark.parametrize(("keywords", "text"), WRONG_PROTOCOLS, ids=range(len(WRONG_PROTOCOLS)))
def test_a_protocol_that_cannot_be_used_is_refused(keywords: Any, text: str, planned: Any, layouts: Any) -> None:
    layouts.too_few = lambda options, config, topology: [Problem(what="ep is too small", expected="8", fix="take more")]
    assert refusal(lambda: planned(**keywords)) == text


@pytest.mark.parametrize(("known", "expected"), [(["ep:all_to_all", "cp:*"], "ep:all_to_all"), (["cp:*"], "ep = 1")])
def test_an_adapter_says_which_protocols_it_can_use(known: Any, expected: str, planned: Any, adapter: Any) -> None:
    assert refusal(lambda: planned(adapter=attrs.evolve(adapter, protocols=known))) == (
        f"HP580: protocol ep:dedup cannot be used by adapter toy; expected {expected}. recipe"
    )


def test_ep_needs_experts(make_plan: Any, toy: Any) -> None:
    adapter = attrs.evolve(toy.ADAPTER, protocols=["ep:*"])
    assert refusal(lambda: make_plan(EP2, adapter=adapter, protocols=(CARRIER,))) == (
        "HP580: mesh.ep is 2, but the model has no routed experts; expected 1. "
        "recipe, mesh: dp_replicate=1 dp_shard=2 pp=1 cp=1 tp=1 ep=2. fix: leave mesh.ep out"
    )


def test_experts_that_do_not_communicate_are_refused(planned: Any, experts: Any, layouts: Any) -> None:
    layouts.experts = lambda info, ctx: attrs.evolve(layout(info, ctx), params={"weight": {"tp": Replicate()}})
    assert refusal(lambda: planned(inventory=experts(parallel=None))) == (
        f"HP580: {EXPERTS} (Experts) does not communicate over ep, whose degree is 2; "
        f"expected a module with a parallel_spec of kind 'ep'. {WHERE}. "
        "fix: replace it by a component that does, or set mesh.ep to 1"
    )


def test_a_module_that_takes_the_whole_mesh_may_hold_experts(planned: Any, experts: Any, layouts: Any) -> None:
    layouts.experts = lambda info, ctx: attrs.evolve(layout(info, ctx), params={"weight": {"tp": Replicate()}})
    assert planned(inventory=experts(parallel=spec(binding_kind="mesh"))).protocols
