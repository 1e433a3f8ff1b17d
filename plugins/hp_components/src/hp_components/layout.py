"""Layouts of the components on the mesh. Torch-free: planning needs no model code.

Legend: B batch, S sequence, T tokens (B x S), H hidden, V vocab, E experts, I intermediate, K top-k.
"""

from __future__ import annotations

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
    """With ep: whole experts cut over it; a rank sends its tokens (its share of them, where tp ranks have equal ones).

    Else every expert's gate, up and down cut over tp on I; tokens are gathered on entry, partial sums leave, and a bias of the
    down projection is added once.
    """
    arguments, by_expert = ("hidden_states", "top_k_index", "top_k_weights"), ctx.topology.ep > 1
    routes: tuple[int | str, ...] = ("T", int(ctx.config["num_experts_per_tok"]))
    whole = [] if by_expert else [name for name in info.parameters if name == "down_proj_bias"]
    cut = {name: {"tp": Replicate() if name in whole else Shard(2)} for name in info.parameters}
    inside = ctx.inside(dim=0, tp=Shard(0) if by_expert else Replicate())
    return ModuleShardingSpec(
        params={name: {"ep": Shard(0)} for name in info.parameters} if by_expert else cut,
        views={name: FirstRank() for name in whole},
        in_src={name: ctx.tokens(dim=0) for name in arguments},
        in_dst=dict.fromkeys(arguments, inside),
        out_src={"output": inside if by_expert else ctx.inside(dim=0, tp=Partial())},
        out_dst={"output": ctx.tokens(dim=0)},
        ports={
            "hidden_states": ctx.hidden(flat=True),
            "top_k_index": Port(shape=routes, dtype="int64"),
            "top_k_weights": Port(shape=routes, dtype="float32"),
            "output": ctx.hidden(flat=True),
        },
        each_token=True,
    )


def check_experts(module: ModuleInfo, sharding: ModuleShardingSpec, context: LayoutContext) -> list[Problem]:
    """Return a problem for every parameter that does not go where the experts go: all of them are cut over ep, or none is."""
    if context.topology.ep == 1:
        return []
    left = [name for name in module.parameters if "ep" not in sharding.params.get(name, {})]
    return [Problem(what=f"{name} is not cut over ep", expected="Shard(0), like its expert") for name in left]


def check_vocabulary(module: object, sharding: ModuleShardingSpec, context: object) -> list[Problem]:
    """Return what is wrong with the layout of a vocabulary-parallel module: ``weight`` may only be cut on its rows."""
    found = sharding.params.get("weight", {}).get("tp", Replicate())
    if found in (Shard(0), Replicate()):
        return []
    return [Problem(what=f"weight is {found} on tp", expected="Shard(0) or Replicate", fix="cut the vocabulary, dim 0")]
