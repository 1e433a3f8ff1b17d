from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import FirstRank, HeadSlice, Init, Partial, Replicate, Shard, Unflatten
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.parameters import at_least_fp32, gradient_of


def refusal(make_plan, topology=None, **changes):
    with pytest.raises(PlanError) as error:
        make_plan(topology, **changes)
    return str(error.value)


def change(layouts, name, **fields):
    given = getattr(layouts, name)
    setattr(layouts, name, lambda info, ctx: attrs.evolve(given(info, ctx), **fields))


@pytest.mark.parametrize(
    ("layout", "varying", "gradient"),
    [
        ({"tp": Shard(1)}, True, Shard(1)),
        ({"tp": Replicate()}, True, Partial()),
        ({}, True, Partial()),
        ({"tp": Replicate()}, False, Replicate()),
        ({}, False, Replicate()),
    ],
)
def test_a_gradient_is_cut_as_its_parameter_and_partial_in_a_varying_body(layout, varying, gradient):
    assert gradient_of(layout, varying=varying) == {"tp": gradient}


def test_a_cut_dim_must_divide(make_plan, toy):
    odd = toy.with_module(toy.inventory, "layers.0.mlp.up", parameters={"weight": toy.tensor(15, 8)})
    assert refusal(make_plan, inventory=odd) == (
        "HP502: dim 0 of layers.0.mlp.up.weight (15) must be divisible by tp (2). "
        "recipe, mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1. fix: set mesh.tp to 1 or 3"
    )


def test_a_cut_dim_must_exist(make_plan, layouts):
    change(layouts, "norm", params={"weight": {"tp": Shard(1)}})
    assert refusal(make_plan) == "HP522: layers.0.norm.weight is declared Shard(1) on tp, but has shape (8,)"


@pytest.mark.parametrize("view", [HeadSlice(0, 2), FirstRank()])
def test_views_of_replicated_parameters_of_varying_bodies_are_kept(make_plan, layouts, view):
    change(layouts, "norm", views={"weight": view})
    assert [p.view for p in make_plan(Topology(tp=4)).parameters if p.fqn == "layers.0.norm.weight"] == [view]


def test_a_view_in_an_invariant_body_is_refused(make_plan, layouts):
    change(layouts, "norm", views={"weight": FirstRank()})
    assert refusal(make_plan, Topology(tp=2, sequence_parallel=False)) == (
        "HP522: layers.0.norm.weight has the view FirstRank() in an invariant body; expected a varying body"
    )


@pytest.mark.parametrize("view", [HeadSlice(1, 2), HeadSlice(0, 3), HeadSlice(0, 8)])
def test_slices_of_a_view_must_divide_dim_and_axis(make_plan, layouts, view):
    change(layouts, "norm", views={"weight": view})
    assert refusal(make_plan, Topology(tp=4)) == (
        f"HP522: layers.0.norm.weight with shape (8,) has the view {view} on tp (4); "
        "expected parts that divide both the dim and tp"
    )


def test_frozen_parameters_are_not_trained(make_plan):
    plan = make_plan(keys={"freeze": ["layers.0.*"], "overrides": [{"match": "layers.1.mlp", "freeze": ["up.*"]}]})
    assert [p.fqn for p in plan.parameters if not p.trainable] == [
        "layers.0.norm.weight",
        "layers.0.mlp.up.weight",
        "layers.0.mlp.down.weight",
        "layers.1.mlp.up.weight",
    ]


def test_a_freeze_pattern_may_name_an_alias(make_plan, toy):
    inventory = attrs.evolve(toy.inventory, aliases={"head.weight": "embed.weight"})
    plan = make_plan(inventory=inventory, keys={"freeze": ["head.*"]})
    assert not plan.parameters[0].trainable


def test_a_freeze_pattern_that_matches_nothing_is_refused(make_plan):
    assert refusal(make_plan, keys={"freeze": ["layer.0.*"]}) == (
        "HP527: freeze pattern 'layer.0.*' matches no parameter; "
        "expected an fnmatch pattern of parameter names such as model.embed_tokens.*. recipe: freeze"
    )


def test_modules_computed_in_fp32_keep_fp32_parameters_and_cast_their_inputs(make_plan, toy):
    adapter = attrs.evolve(toy.ADAPTER, fp32=("layers.*.norm",))
    low = {"model": {"adapter": "toy", "config": {"hidden_size": 8}, "dtype": "bf16"}}
    plan = make_plan(adapter=adapter, keys=low)
    assert {p.dtype for p in plan.parameters if "norm" in p.fqn} == {"float32"}
    assert {p.dtype for p in plan.parameters if "norm" not in p.fqn} == {"bfloat16"}
    assert {b.fqn: b.compute for b in plan.boundaries if b.compute} == {"layers.0.norm": "float32", "layers.1.norm": "float32"}
    high = {"model": {"adapter": "toy", "config": {"hidden_size": 8}, "dtype": "fp64"}}
    plan = make_plan(adapter=adapter, keys=high)
    assert {p.dtype for p in plan.parameters} == {"float64"}
    assert not [b for b in plan.boundaries if b.compute]


def test_fp32_means_at_least_fp32():
    assert [at_least_fp32(dtype) for dtype in ("float16", "bfloat16", "float32", "float64")] == ["float32"] * 3 + ["float64"]


def test_every_parameter_has_the_first_matching_initialisation(make_plan):
    inits = {p.fqn: p.init for p in make_plan().parameters}
    assert inits["layers.0.norm.weight"] == Init(match="*norm.weight", kind="constant", value=1.0)
    assert inits["head.weight"] == Init(match="*", kind="normal", value=0.02)


def test_a_parameter_that_nothing_initialises_is_refused(make_plan, toy):
    adapter = attrs.evolve(toy.ADAPTER, init=toy.ADAPTER.init[:1])
    assert refusal(make_plan, adapter=adapter) == (
        "HP526: nothing initialises the parameter embed.weight; expected an entry in init. adapter toy"
    )


def test_buffers_are_listed_and_initialised(make_plan, toy):
    buffers = {"angle": attrs.evolve(toy.tensor(4), persistent=False)}
    inventory = toy.with_module(toy.inventory, "layers.0.mlp", buffers=buffers)
    (buffer,) = make_plan(inventory=inventory).buffers
    assert (buffer.fqn, buffer.shape, buffer.dtype, buffer.persistent) == ("layers.0.mlp.angle", (4,), "float32", False)
    adapter = attrs.evolve(toy.ADAPTER, init=(Init(match="*.weight", kind="normal", value=1.0),))
    assert refusal(make_plan, inventory=inventory, adapter=adapter) == (
        "HP526: nothing initialises the buffer layers.0.mlp.angle; expected an entry in init. adapter toy"
    )


def test_transforms_of_a_family_follow_its_parameters(make_plan):
    plan = make_plan()
    assert plan.parameters[0].transforms == (Unflatten(0, (-1,)),)
    assert not any(parameter.transforms for parameter in plan.parameters[1:])
