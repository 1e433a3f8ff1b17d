"""What a rank holds for the toy, worked out by hand: embed and head 32 x 8, norms 8, up 16 x 8, down 8 x 16, two layers."""

from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import ParameterPlan, Shard, UnitPlan
from hp_core.mesh.topology import Topology
from hp_core.planner.figures import figures
from hp_core.planner.memory import activation_bytes, gathered_bytes, held_bytes

LAYER, ROOT, TOKENS = 8 + 128 + 128, 512, 4096
STREAM = TOKENS * 8 * 4  # bytes of [1, 4096, 8]


def test_fsdp_holds_the_root_two_layers_and_the_largest_gradient_gathered(make_plan):
    assert gathered_bytes(make_plan(Topology(dp_shard=2))) == 4 * (ROOT + 2 * LAYER + max(ROOT, LAYER))


def test_what_is_not_freed_stays_gathered(make_plan):
    plan = make_plan(Topology(dp_shard=2), keys={"fsdp": {"reshard_after_forward": False}})
    assert gathered_bytes(plan) == 4 * (ROOT + 2 * LAYER + ROOT)


def test_a_model_of_one_layer_gathers_that_one(make_plan):
    plan = make_plan(Topology(dp_shard=2))
    one = attrs.evolve(plan, units=[unit for unit in plan.units if unit.fqn != "layers.1"])
    assert gathered_bytes(one) == 4 * (ROOT + LAYER + LAYER + ROOT + LAYER)  # layer 1 belongs to the root then


def test_nothing_is_gathered_where_fsdp_wraps_nothing(make_plan):
    assert gathered_bytes(make_plan(Topology(tp=2))) == 0


def test_a_boundary_keeps_what_enters_it_and_the_inner_side_of_its_matrices(make_plan):
    """Norms and MLPs get the stream, up and down have 16 features inside; the head is the loss; ids are integers."""
    layer = 2 * STREAM + TOKENS * (16 + 16) * 4
    assert activation_bytes(make_plan(Topology()), experts=()) == 2 * layer + STREAM


def test_tp_cuts_the_norm_s_tokens_and_the_matrices_but_not_what_is_gathered(make_plan):
    layer = STREAM // 2 + STREAM + TOKENS * (8 + 8) * 4
    assert activation_bytes(make_plan(Topology(tp=2)), experts=()) == 2 * layer + STREAM


@pytest.mark.parametrize(("mode", "matrices"), [("full", 0), ("selective", TOKENS * 32 * 4)])
def test_a_recomputed_layer_keeps_its_input_and_one_is_whole_in_the_backward(make_plan, mode, matrices):
    plan = make_plan(Topology(), keys={"recompute": {"mode": mode}})
    whole = 2 * STREAM + TOKENS * 32 * 4
    assert activation_bytes(plan, experts=()) == 2 * (STREAM + matrices) + whole + STREAM


def test_routed_experts_see_each_token_top_k_times(make_plan):
    plan = make_plan(Topology())
    more = attrs.evolve(plan, config={**plan.config, "num_experts_per_tok": 3})
    assert activation_bytes(more, experts=("layers.*.mlp",)) - activation_bytes(plan, experts=()) == 2 * 2 * TOKENS * 32 * 4


def test_the_total_is_the_sum(make_plan, toy):
    found = figures(make_plan(Topology(dp_shard=2)), adapter=toy.ADAPTER)
    parts = (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes, found.gathered_bytes, found.activation_bytes)
    assert found.memory_bytes == sum(parts)


@pytest.mark.parametrize(("dim", "held"), [(0, 2 * 6 * 4), (1, 4 * 3 * 4)])
def test_experts_are_cut_over_ep_and_then_by_their_unit(dim, held):
    """8 experts over ep=2, of each rank's 4 two parts (efsdp 2): on dim 0 or on dim 1."""
    parameter = ParameterPlan(fqn="e.w", owner="e", shape=(8, 6), dtype="float32", layout={"ep": Shard(0)})
    unit = UnitPlan(fqn="e", view="expert", compute="float32", reduce="float32", shard_dim=dim)
    assert held_bytes(parameter, unit, topology=Topology(dp_shard=4, ep=2)) == held
    assert held_bytes(parameter, attrs.evolve(unit, wraps=False), topology=Topology(dp_shard=4, ep=2)) == 4 * 6 * 4
