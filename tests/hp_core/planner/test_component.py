"""A component planned by itself, and replacements that were made for another mesh."""

from __future__ import annotations

import sys
import types

import attrs
import pytest

from hp_core.contracts import (
    Init,
    ModuleFamily,
    ModuleInfo,
    ModuleShardingSpec,
    Partial,
    Problem,
    ProtocolPlan,
    ReplacementPlan,
    Replicate,
    ResolvedFamily,
    Shard,
    Unflatten,
    VariantRule,
)
from hp_core.contracts.inventory import Inventory, TensorInfo
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.checks import check_resolved
from hp_core.planner.component import built_component, check_built, plan_component, plan_filling
from hp_core.planner.serialise import inventory_from_json, inventory_to_json

FAMILY = ModuleFamily(
    name="mlp",
    baseline="toy:Mlp",
    sharding="toy_component:layout",
    validate="toy_component:validate",
    transforms={"up": (Unflatten(0, (2, -1)),)},
    init=[Init(match="*", kind="normal", value=0.02)],
)
RESOLVED = ResolvedFamily(family="mlp", variant="baseline", constructor="toy:Mlp")
INVENTORY = Inventory(
    model_class="toy:Mlp",
    config={"hidden_size": 4},
    modules=[
        ModuleInfo(
            fqn="",
            cls="toy:Mlp",
            forward_args=("x",),
            parameters={"up": TensorInfo(shape=(8, 4), dtype="bfloat16"), "bias": TensorInfo(shape=(4,), dtype="float32")},
            family="mlp",
        )
    ],
)


def layout(info, ctx):
    return ModuleShardingSpec(
        params={"up": {"tp": Shard(0)}, "bias": {"tp": Replicate()}},
        in_src={"x": {"tp": Replicate()}},
        out_src={"output": {"tp": Partial()}},
        out_dst={"output": {"tp": Replicate()}},
    )


@pytest.fixture(autouse=True)
def code(monkeypatch):
    module = types.ModuleType("toy_component")
    vars(module).update(layout=layout, validate=lambda arguments, topology: [])
    monkeypatch.setitem(sys.modules, "toy_component", module)
    return module


def planned(family=FAMILY, *, keep=False, tp=2):
    return plan_component(
        INVENTORY, family, resolved=RESOLVED, topology=Topology(tp=tp), declared_by="family mlp", seed=3, keep=keep
    )


def test_the_root_is_the_boundary_and_parameters_keep_their_dtype():
    plan = planned()
    (boundary,) = plan.boundaries
    assert (boundary.fqn, boundary.family, boundary.varying) == ("", "mlp", True)
    assert [(p.fqn, p.dtype, p.gradient["tp"], p.transforms) for p in plan.parameters] == [
        ("up", "bfloat16", Shard(0), (Unflatten(0, (2, -1)),)),
        ("bias", "float32", Partial(), ()),
    ]
    assert {p.init.match for p in plan.parameters} == {"*"}
    assert plan.options == {"seed": 3}


def test_weights_that_are_kept_need_no_init():
    assert {p.init for p in planned(attrs.evolve(FAMILY, init=()), keep=True).parameters} == {None}


def test_weights_that_nothing_fills_are_refused():
    for plan in (planned, lambda family: plan_filling(INVENTORY, family, seed=0)):
        with pytest.raises(PlanError) as caught:
            plan(attrs.evolve(FAMILY, init=[Init(match="up", kind="constant")]))
        assert str(caught.value) == ("HP526: nothing initialises the parameter bias; expected an entry in init. family mlp")


def test_the_family_may_refuse_the_mesh(code):
    code.validate = lambda arguments, topology: [Problem(what=f"tp is {topology.tp}", expected="1")]
    with pytest.raises(PlanError) as caught:
        planned()
    assert str(caught.value) == "HP560: tp is 2; expected 1. family mlp"


def test_a_built_component_agrees_with_its_own_plan_and_survives_json():
    built = built_component(planned())
    check_built(planned(), "", built)
    inventory = attrs.evolve(INVENTORY, modules=[attrs.evolve(INVENTORY.modules[0], built=built)])
    assert inventory_from_json(inventory_to_json(inventory)) == inventory


def test_a_component_of_another_mesh_does_not_agree():
    with pytest.raises(PlanError) as caught:
        check_built(planned(tp=4), "", built_component(planned()))
    assert str(caught.value) == (
        "HP561: the component was built by itself for the mesh dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1; "
        "expected dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=4 ep=1, as planned. family mlp. "
        "fix: build it the way the model's plan has it, or leave "
        "building to the plan"
    )


def test_a_component_that_speaks_another_protocol_does_not_agree():
    ring = ProtocolPlan(kind="cp", name="ring", version=1, implementation="a:B", sequence_layout="zigzag")
    plain = attrs.evolve(ring, name="hybrid", sequence_layout="contiguous", sub_axes={"outer": 2, "inner": 2})
    built = built_component(attrs.evolve(planned(), protocols=[ring]))
    check_built(attrs.evolve(planned(), protocols=[ring]), "", built)
    for protocols, wanted in (
        ([plain], "cp:hybrid (sequence_layout=contiguous outer=2 inner=2)"),
        ([], "nothing"),
    ):
        with pytest.raises(PlanError) as caught:
            check_built(attrs.evolve(planned(), protocols=protocols), "", built)
        assert caught.value.what == "the component was built by itself to speak cp:ring (sequence_layout=zigzag)"
        assert caught.value.expected == f"{wanted}, as planned"


DEFERRED = ModuleFamily(
    name="attention",
    baseline="toy:Attention",
    variants={"local": "toy:Local", "ring": "toy:Ring"},
    default_variant="local",
    parallel_axis="cp",
    rules=[VariantRule(when={"parallel": True}, variant="ring")],
)


def record(**fields):
    return ReplacementPlan(
        **{
            "fqn": "layers.0.attention",
            "source": "toy:Old",
            "family": "attention",
            "constructor": "toy:Local",
            "declared_by": "recipe.yaml:3",
            "variant": "local",
            "degrees": {"cp": 1},
            **fields,
        }
    )


def test_a_replacement_fits_the_mesh_that_it_was_resolved_for():
    check_resolved(record(), DEFERRED, topology=Topology(tp=8))
    check_resolved(record(constructor="toy:Ring", variant="ring", degrees={"cp": 2}), DEFERRED, topology=Topology(cp=2))


def test_a_replacement_of_another_mesh_is_refused():
    with pytest.raises(PlanError) as caught:
        check_resolved(record(), DEFERRED, topology=Topology(cp=2))
    assert str(caught.value) == (
        "HP560: layers.0.attention was built as attention/local for cp=1; expected attention/ring, for mesh: dp_replicate=1 "
        "dp_shard=1 pp=1 cp=2 tp=1 ep=1. recipe.yaml:3"
    )
