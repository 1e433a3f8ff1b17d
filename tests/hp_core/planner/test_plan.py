from __future__ import annotations

import pytest

from hp_core.contracts import Partial, Problem, Replicate, Shard
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.serialise import plan_digest, plan_to_json


def test_every_module_becomes_what_its_layout_says(make_plan):
    plan = make_plan(Topology(tp=2))
    assert [(b.fqn, b.varying, b.family) for b in plan.boundaries] == [
        ("embed", True, "table"),
        ("layers.0.norm", True, None),
        ("layers.0.mlp", True, None),
        ("layers.1.norm", True, None),
        ("layers.1.mlp", True, None),
        ("head", True, None),
    ]
    assert {p.fqn: (p.layout["tp"], p.gradient["tp"]) for p in plan.parameters if "1" not in p.fqn} == {
        "embed.weight": (Shard(0), Shard(0)),
        "layers.0.norm.weight": (Replicate(), Partial()),
        "layers.0.mlp.up.weight": (Shard(0), Shard(0)),
        "layers.0.mlp.down.weight": (Shard(1), Shard(1)),
        "head.weight": (Shard(0), Shard(0)),
    }
    assert [unit.fqn for unit in plan.units] == ["layers.0", "layers.1", ""]
    assert plan.loss == "head"
    assert plan.replacements[0].source == "toy:Embedding"


def test_one_rank_needs_no_collective(make_plan):
    plan = make_plan(Topology())
    assert not any(boundary.collectives or boundary.varying for boundary in plan.boundaries)
    assert {type(parameter.gradient["tp"]) for parameter in plan.parameters} == {Shard, Replicate}


def test_without_sequence_parallelism_norms_are_invariant(make_plan):
    plan = make_plan(Topology(tp=2, sequence_parallel=False))
    norms = [boundary for boundary in plan.boundaries if boundary.fqn.endswith("norm")]
    assert not any(norm.varying or norm.collectives for norm in norms)
    assert [p.gradient for p in plan.parameters if p.fqn == "layers.0.norm.weight"] == [{"tp": Replicate()}]


def test_equal_inputs_give_equal_plans(make_plan):
    one, other = make_plan(), make_plan()
    assert one == other
    assert plan_to_json(one) == plan_to_json(other)
    assert plan_digest(one) == plan_digest(other) != plan_digest(make_plan(Topology(tp=4)))


def test_the_recipe_reaches_the_plan(make_plan):
    keys = {
        "model": {"adapter": "toy", "config": {"hidden_size": 8}, "dtype": "bf16"},
        "precision": {"compute": "bf16", "reduce": "fp32"},
        "fsdp": {"reshard_after_forward": False},
        "recompute": {"mode": "full", "layers": [1]},
        "loss": {"chunk": 7},
    }
    plan = make_plan(keys=keys)
    assert plan.model_dtype == "bfloat16"
    assert {(unit.compute, unit.reduce, unit.reshard_after_forward) for unit in plan.units} == {("bfloat16", "float32", False)}
    assert [(entry.fqn, entry.mode) for entry in plan.recompute] == [("layers.1", "full")]
    assert plan.options == {"seed": 0, "loss_chunk": 7, "cpu_matmul": "auto"}
    assert (plan.batch, plan.sequence) == (1, 4096)


def test_a_plan_names_the_plugins_that_it_uses(make_plan):
    plan = make_plan()
    assert len(plan.plugins) == 1
    assert plan.plugins[0] in plan.boundaries[1].declared_by


def test_a_plugin_may_refuse_the_plan(make_plan):
    with pytest.raises(PlanError) as error:
        make_plan(problems=(Problem(what="odd layers", expected="even ones", where="layers.1", fix="remove one"),))
    assert error.value.code == "HP528"
    assert "refuses the plan: odd layers; expected even ones. layers.1. fix: remove one" in error.value.message


def test_layouts_that_leave_tp_out_are_noted(make_plan, layouts):
    given = layouts.norm
    layouts.norm = lambda info, ctx: _without_tp(given(info, ctx))
    plan = make_plan()
    assert plan.notes == (
        f"{plan.boundaries[1].declared_by}: weight of layers.0.norm and 1 more name no tp placement: Replicate",
        "no train section: figures are for a micro-batch of 1 x 4096 tokens",
    )


def _without_tp(spec):
    import attrs

    return attrs.evolve(spec, params={"weight": {}})
