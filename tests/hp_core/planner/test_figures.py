"""Figures of the toy, worked out by hand: embed and head 32 x 8, norms 8, up 16 x 8, down 8 x 16, two layers."""

from __future__ import annotations

import attrs
import pytest

from hp_core.mesh.topology import Topology
from hp_core.planner.figures import active_parameters, figures

TOTAL = 2 * 256 + 2 * (8 + 128 + 128)


def test_one_rank_holds_and_computes_everything_and_sends_nothing(make_plan, toy, layouts):
    layouts.flops = lambda config, sequence: 2.0 * sequence
    found = figures(make_plan(Topology()), adapter=attrs.evolve(toy.ADAPTER, flops="toy_layouts:flops"))
    assert (found.total, found.active, found.flops_per_token) == (TOTAL, TOTAL, 8192.0)
    assert (found.parameter_bytes, found.gradient_bytes, found.optimizer_bytes) == (4 * TOTAL, 4 * TOTAL, 8 * TOTAL)
    assert (found.boundary_forward_bytes, found.boundary_backward_bytes, found.completion_bytes) == (0, 0, 0)
    assert (found.fsdp_forward_bytes, found.fsdp_backward_bytes, found.gathered_bytes) == (0, 0, 0)


def test_tp_halves_what_is_cut_and_completes_the_rest(make_plan, toy):
    found = figures(make_plan(Topology(tp=2)), adapter=toy.ADAPTER)
    assert found.parameter_bytes == 4 * ((TOTAL - 16) // 2 + 16)
    stream = 4096 * 8 * 4  # bytes of [1, 4096, 8]; half of it forward, half backward, at 6 ports
    assert (found.boundary_forward_bytes, found.boundary_backward_bytes) == (3 * stream, 3 * stream)
    assert found.completion_bytes == 2 * (2 * 8 * 4 // 2)  # two norms, all-reduced
    assert found.flops_per_token is None


def test_fsdp_gathers_twice_where_it_frees_and_reduces_once(make_plan, toy):
    found = figures(make_plan(Topology(dp_shard=2)), adapter=toy.ADAPTER)
    layers, root = 4 * 528, 4 * 512
    assert (found.fsdp_forward_bytes, found.fsdp_backward_bytes) == ((layers + root) // 2, (2 * layers + root) // 2)
    assert found.parameter_bytes == 2 * TOTAL


def test_hsdp_also_sums_over_the_copies(make_plan, toy):
    one = figures(make_plan(Topology(dp_shard=2)), adapter=toy.ADAPTER)
    copies = figures(make_plan(Topology(dp_shard=2, dp_replicate=2)), adapter=toy.ADAPTER)
    assert copies.fsdp_backward_bytes - one.fsdp_backward_bytes == 4 * TOTAL // 2
    assert copies.fsdp_forward_bytes == one.fsdp_forward_bytes
    assert copies.parameter_bytes == one.parameter_bytes


def test_frozen_parameters_have_no_gradient(make_plan, toy):
    found = figures(make_plan(Topology(), keys={"freeze": ["embed.*"]}), adapter=toy.ADAPTER)
    assert found.gradient_bytes == 4 * (TOTAL - 256)


def test_the_rank_with_the_most_rows_counts(make_plan, toy):
    plan = make_plan(Topology(dp_shard=3))
    rows = 2 * 11 * 8 + 2 * (3 + 6 * 8 + 3 * 16)  # ceilings of 32, 8, 16 and 8 rows over 3 ranks
    assert figures(plan, adapter=toy.ADAPTER).parameter_bytes == 4 * rows


@pytest.mark.parametrize(("patterns", "active"), [((), TOTAL), (("layers.*.mlp",), TOTAL - 2 * (128 + 128) + 2 * (16 + 32))])
def test_of_routed_experts_a_token_uses_top_k(make_plan, patterns, active):
    plan = make_plan(Topology())
    assert active_parameters(plan.parameters, experts=patterns, config={"num_experts_per_tok": 2}) == active
