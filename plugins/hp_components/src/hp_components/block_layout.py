"""Layouts of norms, dense blocks and routers on the mesh. Torch-free: planning needs no model code.

Legend: B batch, S sequence, T tokens (B x S), H hidden, I intermediate, E experts, K top-k.
"""

from __future__ import annotations

from hp_core.contracts import FirstRank, Layout, LayoutContext, ModuleInfo, ModuleShardingSpec, Partial, Port, Replicate, Shard
from hp_core.contracts.placement import Placement
from hp_core.errors import PlanError

ROUTED = ("router_logits", "router_scores", "router_indices")


def rms_norm(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Each token by itself: computed where the token is. Under sequence parallelism the weight's gradient is Partial."""
    (size,) = info.parameters["weight"].shape
    width = ctx.config.get("hidden_size", size)
    if size != width:
        raise PlanError(
            "HP522",
            f"{info.fqn} normalises {size} features, hidden_size is {width}",
            expected="a norm of the residual stream",
            where="family rms_norm",
            fix="replace the attention around it, which computes its own norms",
        )
    argument, port = info.forward_args[0], Port(shape=("B", "S", size))
    return ModuleShardingSpec(
        params={"weight": {"tp": Replicate()}},
        in_src={argument: ctx.residual},
        in_dst={argument: ctx.residual},
        out_src={"output": ctx.residual},
        out_dst={"output": ctx.residual},
        ports={argument: port, "output": port},
        each_token=True,
    )


def swiglu_mlp(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Gate and up cut by columns, down by rows; tokens are gathered on entry, partial sums leave, a bias is added once."""
    parameters = ctx.parameters(info)
    port = Port(shape=("B", "S", parameters["down_proj.weight"].shape[0]))
    return ModuleShardingSpec(
        params={path: {"tp": _mlp_placement(path)} for path in parameters},
        views={path: FirstRank() for path in parameters if path == "down_proj.bias"},
        in_src={"x": ctx.residual},
        in_dst={"x": ctx.inside(dim=1)},
        out_src={"output": ctx.inside(dim=1, tp=Partial())},
        out_dst={"output": ctx.residual},
        ports={"x": port, "output": port},
        each_token=True,
    )


def _mlp_placement(path: str) -> Placement:
    if path == "down_proj.bias":
        return Replicate()
    return Shard(1) if path == "down_proj.weight" else Shard(0)


def topk_router(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Each token by itself; logits and choices stay where the token is. The argument is [T, H], or [B, S, H] for sigmoid."""
    experts, hidden = info.parameters["weight"].shape
    flat, tokens, routes = info.attributes["input_dims"] == 2, ctx.tokens(dim=0), ("T", info.attributes["top_k"])
    arrives: Layout = tokens if flat else ctx.residual
    return ModuleShardingSpec(
        params={"weight": {"tp": Replicate()}},
        in_src={"hidden_states": arrives},
        in_dst={"hidden_states": arrives},
        out_names=ROUTED,
        out_src=dict.fromkeys(ROUTED, tokens),
        out_dst=dict.fromkeys(ROUTED, tokens),
        ports={
            "hidden_states": Port(shape=("T", hidden) if flat else ("B", "S", hidden)),
            "router_logits": Port(shape=("T", experts), dtype="float32"),
            "router_scores": Port(shape=routes, dtype="float32"),
            "router_indices": Port(shape=routes, dtype="int64"),
        },
        each_token=True,
    )
