from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import ParameterPlan, UnitPlan
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.units import plan_recompute, unit_of, wrapped

LOW = {"model": {"adapter": "toy", "config": {"hidden_size": 8}, "dtype": "bf16"}}
LAYERS = ("layers.0", "layers.1", "layers.2")


def test_layers_are_units_and_the_root_is_last_and_stays_gathered(make_plan):
    units = make_plan().units
    assert [(unit.fqn, unit.reshard_after_forward) for unit in units] == [("layers.0", True), ("layers.1", True), ("", False)]
    assert {(unit.view, unit.compute, unit.reduce, unit.shard_dim) for unit in units} == {("dense", "float32", "float32", 0)}


def test_a_model_without_a_stack_is_one_unit(make_plan, toy):
    assert [unit.fqn for unit in make_plan(adapter=attrs.evolve(toy.ADAPTER, stack=None)).units] == [""]


def test_a_module_computed_in_fp32_is_a_unit_before_its_layer(make_plan, toy):
    adapter = attrs.evolve(toy.ADAPTER, fp32=("layers.*.norm",))
    units = make_plan(adapter=adapter, keys={**LOW, "precision": {"reduce": "bf16"}}).units
    assert [(unit.fqn, unit.compute, unit.reduce) for unit in units] == [
        ("layers.0.norm", "float32", "float32"),
        ("layers.0", "bfloat16", "bfloat16"),
        ("layers.1.norm", "float32", "float32"),
        ("layers.1", "bfloat16", "bfloat16"),
        ("", "bfloat16", "bfloat16"),
    ]


def test_it_needs_no_unit_where_everything_is_in_fp32(make_plan, toy):
    adapter = attrs.evolve(toy.ADAPTER, fp32=("layers.*.norm",))
    assert [unit.fqn for unit in make_plan(adapter=adapter).units] == ["layers.0", "layers.1", ""]


def test_an_fp32_module_outside_every_layer_comes_before_the_root(make_plan, toy):
    units = make_plan(adapter=attrs.evolve(toy.ADAPTER, fp32=("head",)), keys=LOW).units
    assert [unit.fqn for unit in units] == ["layers.0", "layers.1", "head", ""]


def test_tied_parameters_in_two_units_are_refused(make_plan, toy):
    inventory = attrs.evolve(toy.inventory, aliases={"layers.1.norm.weight": "layers.0.norm.weight"})
    with pytest.raises(PlanError) as error:
        make_plan(inventory=inventory)
    assert str(error.value) == (
        "HP521: layers.0.norm.weight is tied to layers.1.norm.weight, which lies in another FSDP unit; "
        "expected tied parameters in one unit"
    )


def test_a_parameter_belongs_to_the_innermost_unit():
    units = dict.fromkeys(["layers.0.norm", "layers.0", ""])
    assert unit_of("layers.0.norm.weight", units) == "layers.0.norm"
    assert unit_of("layers.0.mlp.up.weight", units) == "layers.0"
    assert unit_of("head.weight", units) == ""


@pytest.mark.parametrize(
    ("mode", "chosen", "expected"),
    [
        ("off", None, []),
        ("full", None, ["layers.0", "layers.1", "layers.2"]),
        ("selective", (2, 0), ["layers.0", "layers.2"]),
        ("full", ("*.1", 1), ["layers.1"]),
    ],
)
def test_layers_to_recompute_are_named_by_index_or_pattern(mode, chosen, expected):
    found = plan_recompute(LAYERS, mode=mode, chosen=chosen)
    assert [entry.fqn for entry in found] == expected
    assert {entry.mode for entry in found} <= {mode}


def test_a_layer_that_the_model_does_not_have_is_refused():
    with pytest.raises(PlanError) as error:
        plan_recompute(LAYERS, mode="full", chosen=(3,))
    assert str(error.value) == "HP514: recompute.layers names layer 3; expected 0 to 2"


def test_a_pattern_that_matches_no_layer_is_refused():
    with pytest.raises(PlanError) as error:
        plan_recompute(LAYERS, mode="full", chosen=("layer.*",))
    assert str(error.value) == "HP527: recompute.layers pattern 'layer.*' matches no layer; expected a pattern of layer names"


EXPERTS = (("experts", "expert"), ("", "dense"))
WRAPS = [
    ({}, "float32", "float32", "float32", False),
    ({"tp": 2}, "float32", "float32", "float32", False),
    ({"dp_shard": 2}, "float32", "float32", "float32", True),
    ({"dp_replicate": 2}, "float32", "float32", "float32", True),
    ({}, "bfloat16", "float32", "bfloat16", False),
    ({}, "bfloat16", "float32", "float32", True),
    ({}, "bfloat16", "bfloat16", "bfloat16", True),
]


@pytest.mark.parametrize(("mesh", "compute", "router", "dtype", "wraps"), WRAPS)
def test_wrapped_unless_one_rank_holds_everything_in_the_dtype_it_computes_in(mesh, compute, router, dtype, wraps):
    units = [
        UnitPlan(fqn="layers.0.gate", compute=router, reduce="float32"),
        UnitPlan(fqn="layers.0", compute=compute, reduce="float32"),
        UnitPlan(fqn="", compute=compute, reduce="float32"),
    ]
    parameters = [
        ParameterPlan(fqn="layers.0.gate.weight", owner="", shape=(4,), dtype="float32"),
        ParameterPlan(fqn="layers.0.proj.weight", owner="", shape=(4,), dtype=dtype),
        ParameterPlan(fqn="head.weight", owner="", shape=(4,), dtype=dtype),
    ]
    found = wrapped(units, parameters, topology=Topology(**mesh))
    assert [unit.wraps for unit in found] == [wraps] * 3


def test_experts_on_one_storage_rank_are_not_wrapped_and_on_several_they_are():
    units = [UnitPlan(fqn=fqn, view=view, compute="float32", reduce="float32") for fqn, view in EXPERTS]
    meshes = ({"tp": 2}, {"dp_shard": 2}, {"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2})
    found = [[unit.wraps for unit in wrapped(units, [], topology=Topology(**mesh, ep=2))] for mesh in meshes]
    assert found == [[False, False], [False, True], [True, True], [True, True]]
    half = ParameterPlan(fqn="experts.weight", owner="", shape=(4,), dtype="bfloat16")  # computed in float32
    assert all(unit.wraps for unit in wrapped(units, [half], topology=Topology(dp_shard=2, ep=2)))


def test_a_plan_says_whether_its_units_are_wrapped(make_plan):
    assert (make_plan(Topology(tp=2)).wraps, make_plan(Topology(tp=2, dp_shard=2)).wraps) == (False, True)
