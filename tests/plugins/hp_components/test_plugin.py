"""What hp-components declares, and where its components lie on the mesh."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hp_components import plugin
from hp_components.layout import check_experts, check_vocabulary, grouped_experts, linear_cross_entropy, vocab_embedding
from hp_core.contracts import (
    FirstRank,
    Inventory,
    LayoutContext,
    ModuleInfo,
    ModuleShardingSpec,
    Partial,
    Problem,
    Replicate,
    Shard,
    TensorInfo,
    Unflatten,
)
from hp_core.mesh.topology import Topology
from hp_core.plugins.lazy import load

INFO = ModuleInfo(fqn="m", cls="a:B")
TENSOR = TensorInfo(shape=(4, 2, 4), dtype="float32")
EXPERTS = ModuleInfo(fqn="m", cls="a:B", parameters={"gate_up_proj": TENSOR, "down_proj": TENSOR})


def context(topology: Topology | None = None, *, sequence_parallel: bool = True) -> LayoutContext:
    return LayoutContext(
        topology=topology or Topology(tp=2, sequence_parallel=sequence_parallel),
        config={"hidden_size": 8, "num_experts_per_tok": 2},
        inventory=Inventory(model_class="a:B", config={}, modules=()),
    )


def test_declarations_import_neither_torch_nor_transformers() -> None:
    code = "import sys, hp_components.plugin, hp_components.layout; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("family", plugin.hp_families(), ids=lambda family: family.name)
def test_every_reference_loads(family) -> None:
    for reference in (family.baseline, family.sharding, family.validate):
        assert reference is None or callable(load(reference))


def test_gate_and_up_are_taken_apart_by_a_transform() -> None:
    families = {family.name: family for family in plugin.hp_families()}
    apart = (Unflatten(1, (2, -1)),)
    assert families["grouped_experts"].transforms == {"gate_up_proj": apart, "gate_up_proj_bias": apart}


@pytest.mark.parametrize(
    ("sequence_parallel", "residual"), [(True, Shard(1)), (False, Replicate())], ids=["sequence parallel", "off"]
)
def test_embedding_sums_rows_of_the_ranks_into_the_residual_stream(sequence_parallel, residual) -> None:
    spec = vocab_embedding(INFO, context(sequence_parallel=sequence_parallel))
    assert spec.params == {"weight": {"tp": Shard(0)}}
    assert spec.in_src == spec.in_dst == {"input": {"cp": Shard(1), "tp": Replicate()}}
    assert spec.out_src == {"output": {"cp": Shard(1), "tp": Partial()}}
    assert spec.out_dst == {"output": {"cp": Shard(1), "tp": residual}}


@pytest.mark.parametrize(
    ("sequence_parallel", "residual"), [(True, Shard(1)), (False, Replicate())], ids=["sequence parallel", "off"]
)
def test_head_takes_whole_hidden_states_and_gives_whole_losses(sequence_parallel, residual) -> None:
    spec = linear_cross_entropy(INFO, context(sequence_parallel=sequence_parallel))
    assert spec.params == {"weight": {"tp": Shard(0)}}
    assert spec.in_src == {"input": {"cp": Shard(1), "tp": residual}}
    assert spec.in_dst == {"input": {"cp": Shard(1), "tp": Replicate()}}
    assert spec.out_src == spec.out_dst == {"output": {"cp": Shard(1), "tp": Replicate()}}


@pytest.mark.parametrize(
    ("sequence_parallel", "tokens"), [(True, Shard(0)), (False, Replicate())], ids=["sequence parallel", "off"]
)
def test_experts_cut_the_intermediate_dim_and_gather_tokens(sequence_parallel, tokens) -> None:
    tensor = TensorInfo(shape=(2, 2, 4), dtype="float32")
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    info = ModuleInfo(fqn="m", cls="a:B", parameters=dict.fromkeys(names, tensor))
    spec = grouped_experts(info, context(sequence_parallel=sequence_parallel))
    assert spec.params == {**{name: {"tp": Shard(2)} for name in names}, "down_proj_bias": {"tp": Replicate()}}
    assert spec.views == {"down_proj_bias": FirstRank()}
    assert set(spec.in_src) == set(spec.in_dst) == {"hidden_states", "top_k_index", "top_k_weights"}
    assert all(layout == {"cp": Shard(0), "tp": tokens} for layout in spec.in_src.values())
    assert all(layout == {"cp": Shard(0), "tp": Replicate()} for layout in spec.in_dst.values())
    assert spec.out_src == {"output": {"cp": Shard(0), "tp": Partial()}}
    assert spec.out_dst == {"output": {"cp": Shard(0), "tp": tokens}}
    assert {name: (port.shape, port.dtype) for name, port in spec.ports.items()} == {
        "hidden_states": (("T", 8), "compute"),
        "top_k_index": (("T", 2), "int64"),
        "top_k_weights": (("T", 2), "float32"),
        "output": (("T", 8), "compute"),
    }


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_with_ep_whole_experts_are_cut_and_tokens_are_each_ranks_own(sequence_parallel: bool) -> None:
    topology = Topology(tp=2, dp_shard=2, ep=4, sequence_parallel=sequence_parallel)
    spec = grouped_experts(EXPERTS, context(topology))
    assert spec.params == {name: {"ep": Shard(0)} for name in ("gate_up_proj", "down_proj")}
    arrives, own = {"cp": Shard(0), "tp": Shard(0) if sequence_parallel else Replicate()}, {"cp": Shard(0), "tp": Shard(0)}
    assert spec.in_src == dict.fromkeys(("hidden_states", "top_k_index", "top_k_weights"), arrives)
    assert spec.in_dst == dict.fromkeys(("hidden_states", "top_k_index", "top_k_weights"), own)
    assert (spec.out_src, spec.out_dst) == ({"output": own}, {"output": arrives})


def test_every_parameter_of_experts_goes_where_the_experts_go() -> None:
    cut = ModuleShardingSpec(params={"gate_up_proj": {"ep": Shard(0)}})
    assert check_experts(EXPERTS, cut, context(Topology())) == []
    assert check_experts(EXPERTS, cut, context(Topology(dp_shard=2, ep=2))) == [
        Problem(what="down_proj is not cut over ep", expected="Shard(0), like its expert")
    ]


def test_a_vocabulary_is_cut_on_its_rows_only() -> None:
    def check(placement):
        return check_vocabulary(INFO, ModuleShardingSpec(params={"weight": {"tp": placement}}), context())

    assert check(Shard(0)) == check(Replicate()) == []
    assert check(Shard(1)) == [
        Problem(what="weight is Shard(1) on tp", expected="Shard(0) or Replicate", fix="cut the vocabulary, dim 0")
    ]
