from __future__ import annotations

import pytest

from hp_core.contracts import ModuleShardingSpec, Partial, Shard
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.explain import explain, why_varying


def test_a_boundary_is_told_with_its_reasons(make_plan):
    plan = make_plan()
    by = plan.boundaries[2].declared_by
    assert explain(plan, "layers.0.mlp") == [
        "layers.0.mlp is a boundary of class toy:Mlp",
        f"  declared by: {by}",
        "  body on tp: varying, because parameter up.weight is Shard(0) on tp",
        "  input x: tp=Shard(1) cp=Shard(1) -> tp=Replicate cp=Shard(1), all_gather(1) / reduce_scatter on tp, "
        "65,536 bytes forward, 65,536 backward, of 32,768 elements",
        "  output output: tp=Partial cp=Shard(1) -> tp=Shard(1) cp=Shard(1), reduce_scatter(1) / all_gather on tp, "
        "65,536 bytes forward, 65,536 backward, of 32,768 elements",
        "  parameter layers.0.mlp.up.weight: tp=Shard(0), gradient tp=Shard(0)",
        "  parameter layers.0.mlp.down.weight: tp=Shard(1), gradient tp=Shard(1)",
        "  FSDP unit: layers.0, not wrapped",
    ]


def test_a_parameter_is_told_with_the_reason_of_its_gradient(make_plan):
    plan = make_plan()
    by = plan.boundaries[1].declared_by
    assert explain(plan, "layers.0.norm.weight") == [
        "layers.0.norm.weight is a parameter of shape 8, float32",
        f"  declared by: layers.0.norm: {by}",
        "  placement: tp=Replicate",
        "  gradient: tp=Partial, because it is replicated in a varying body (input x is Shard(1) on tp); "
        "the view completes it once",
        "  trainable: yes",
        "  init: constant, entry '*norm.weight'",
        "  FSDP unit: layers.0, not wrapped",
    ]


@pytest.mark.parametrize(
    ("topology", "fqn", "told"),
    [
        (Topology(), "head", "  body on tp: invariant, because tp is 1"),
        (Topology(), "layers.0.norm.weight", "  gradient: tp=Replicate, because tp is 1"),
        (Topology(tp=2), "head.weight", "  gradient: tp=Shard(0), because a sharded parameter has a sharded gradient"),
        (
            Topology(tp=2, sequence_parallel=False),
            "layers.0.norm.weight",
            "  gradient: tp=Replicate, because it is replicated in an invariant body: complete on every rank",
        ),
        (
            Topology(tp=2, sequence_parallel=False),
            "layers.0.norm",
            "  body on tp: invariant, because no parameter, input or output of its body is Shard or Partial on tp",
        ),
        (Topology(tp=2), "embed", "  replaced: toy:Embedding by adapter toy"),
        (Topology(tp=2), "layers.1", "  layers.1.mlp"),
        (Topology(tp=2), "", "  layers.1.mlp"),
        (Topology(tp=2), "layers.1.mlp.up", "layers.1.mlp.up lies in the boundary layers.1.mlp:"),
    ],
)
def test_every_kind_of_name_has_an_explanation(make_plan, topology, fqn, told):
    assert told in explain(make_plan(topology), fqn)


def test_an_unknown_name_is_refused(make_plan):
    with pytest.raises(PlanError) as error:
        explain(make_plan(), "layers.0.mpl")
    assert str(error.value) == "HP525: the plan has no module or parameter 'layers.0.mpl'; did you mean 'layers.0.mlp'?"


def test_the_first_reason_is_given():
    spec = ModuleShardingSpec(in_src={"x": {"tp": Shard(1)}}, in_dst={"x": {"tp": Shard(1)}})
    assert why_varying(spec) == "input x is Shard(1) on tp"
    assert why_varying(ModuleShardingSpec(out_src={"output": {"tp": Partial()}})) == "output output is Partial on tp"
