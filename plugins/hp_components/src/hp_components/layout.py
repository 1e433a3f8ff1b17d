"""Layouts of the components on the mesh. Torch-free: planning needs no model code.

Legend: B batch, S sequence, T tokens (B x S), H hidden, V vocab, E experts, I intermediate, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.contracts import (
    FirstRank,
    LayoutContext,
    ModuleInfo,
    ModuleShardingSpec,
    Partial,
    Port,
    Problem,
    Replicate,
    Shard,
)
from hp_core.mesh.topology import Topology


def vocab_embedding(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Rows of ``weight`` [V, H] cut over tp; each rank looks up its own ids, the sum over tp is the residual stream."""
    return ModuleShardingSpec(
        params={"weight": {"tp": Shard(0)}},
        in_src={"input": ctx.inside(dim=1)},
        in_dst={"input": ctx.inside(dim=1)},
        out_src={"output": ctx.inside(dim=1, tp=Partial())},
        out_dst={"output": ctx.residual},
        ports={"input": Port(shape=("B", "S"), dtype="int64"), "output": ctx.hidden()},
        each_token=True,
    )


def linear_cross_entropy(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Rows of ``weight`` [V, H] cut over tp; the component exchanges two numbers a token, its losses [B, S] are whole."""
    return ModuleShardingSpec(
        params={"weight": {"tp": Shard(0)}},
        in_src={"input": ctx.residual},
        in_dst={"input": ctx.inside(dim=1)},
        out_src={"output": ctx.inside(dim=1)},
        out_dst={"output": ctx.inside(dim=1)},
        ports={"input": ctx.hidden(), "output": Port(shape=("B", "S"), dtype="float32")},
    )


def grouped_experts(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Every expert's gate, up and down cut over tp on I; tokens are gathered on entry, partial sums leave.

    A bias of the down projection is added once.
    """
    arguments = ("hidden_states", "top_k_index", "top_k_weights")
    routes: tuple[int | str, ...] = ("T", int(ctx.config["num_experts_per_tok"]))
    whole = [name for name in info.parameters if name == "down_proj_bias"]
    return ModuleShardingSpec(
        params={name: {"tp": Replicate() if name in whole else Shard(2)} for name in info.parameters},
        views={name: FirstRank() for name in whole},
        in_src={name: ctx.tokens(dim=0) for name in arguments},
        in_dst={name: ctx.inside(dim=0, tp=Replicate()) for name in arguments},
        out_src={"output": ctx.inside(dim=0, tp=Partial())},
        out_dst={"output": ctx.tokens(dim=0)},
        ports={
            "hidden_states": ctx.hidden(flat=True),
            "top_k_index": Port(shape=routes, dtype="int64"),
            "top_k_weights": Port(shape=routes, dtype="float32"),
            "output": ctx.hidden(flat=True),
        },
        each_token=True,
    )


def check_grouped_experts(arguments: Mapping[str, Any], topology: Topology) -> list[Problem]:
    """Return a problem if ep is more than 1: this family has no member that dispatches tokens."""
    if topology.ep == 1:
        return []
    return [
        Problem(
            what=f"mesh.ep is {topology.ep}, but the family grouped_experts has no expert-parallel member",
            expected="1",
            where=f"mesh: {topology}",
            fix="set mesh.ep to 1; the experts are then cut over tp",
            code="HP515",
        )
    ]


def check_vocabulary(module: object, sharding: ModuleShardingSpec, context: object) -> list[Problem]:
    """Return what is wrong with the layout of a vocabulary-parallel module: ``weight`` may only be cut on its rows."""
    found = sharding.params.get("weight", {}).get("tp", Replicate())
    if found in (Shard(0), Replicate()):
        return []
    return [Problem(what=f"weight is {found} on tp", expected="Shard(0) or Replicate", fix="cut the vocabulary, dim 0")]
