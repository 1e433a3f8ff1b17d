"""Layouts of attention components on the mesh. Torch-free: planning needs no model code.

Legend: B batch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hp_core.contracts import HeadSlice, LayoutContext, ModuleInfo, ModuleShardingSpec, Partial, Port, Problem, Replicate, Shard
from hp_core.contracts.placement import FirstRank, Placement, View
from hp_core.errors import PlanError

FUSED = "qkv_proj.weight"
LATENT = ("q_a_proj.", "q_a_layernorm.", "kv_a_proj_with_mqa.", "kv_a_layernorm.")  # what all heads share


def gqa_attention(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Heads cut over tp. With fewer key-value heads than ranks, a rank computes the one that its query heads use.

    A fused projection is cut by whole key-value heads. HP502: heads that do not divide.
    """
    paths, kv_heads, tp = tuple(ctx.parameters(info)), info.attributes["num_kv_heads"], ctx.topology.tp
    if FUSED in paths and kv_heads % tp:
        raise PlanError(
            "HP502",
            f"{info.fqn}.num_kv_heads ({kv_heads}) must be divisible by tp ({tp}) where queries, keys and values are fused",
            where="mesh.tp",
            fix="with: {qkv: separate}",
        )
    few = kv_heads < tp
    if few and tp % kv_heads:
        raise PlanError(
            "HP502",
            f"tp ({tp}) must be divisible by {info.fqn}.num_kv_heads ({kv_heads}) when it is larger",
            where="mesh.tp",
            fix=f"set mesh.tp to a multiple or a divisor of {kv_heads}",
        )
    views: dict[str, View] = _output_bias(paths)
    if few:
        views |= {path: HeadSlice(dim=0, parts=kv_heads) for path in paths if path.startswith(("k_proj.", "v_proj."))}
    whole = (*views, "q_norm.weight", "k_norm.weight")
    counts = ("num_heads",) if few else ("num_heads", "num_kv_heads")
    return _attention(ctx, paths, whole=whole, views=views, counts=counts, hidden=_hidden(info, ctx))


def mla_attention(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Heads cut over tp; the latents and their norms are whole on every rank, so their gradients are Partial."""
    paths = tuple(ctx.parameters(info))
    views = _output_bias(paths)
    whole = (*views, *(path for path in paths if path.startswith(LATENT)))
    return _attention(ctx, paths, whole=whole, views=views, counts=("num_heads",), hidden=_hidden(info, ctx))


def check_over_cp(info: ModuleInfo, spec: ModuleShardingSpec, ctx: LayoutContext) -> list[Problem]:
    """Return why the module cannot attend over cp: its dropout, where a configuration says so."""
    rate = ctx.config.get("attention_dropout") or 0.0
    if ctx.topology.cp == 1 or not rate:
        return []
    what, expected = (
        f"attention_dropout is {rate} with cp={ctx.topology.cp}",
        "0: ranks would drop other weights than one process",
    )
    return [Problem(what=what, expected=expected, where="model.config.attention_dropout", fix="set attention_dropout to 0")]


def _attention(
    ctx: LayoutContext,
    paths: Iterable[str],
    *,
    whole: Iterable[str],
    views: Mapping[str, View],
    counts: tuple[str, ...],
    hidden: int,
) -> ModuleShardingSpec:
    """Tokens are gathered on entry, partial sums of the heads leave; the angles are whole on every rank."""
    angles, port, whole = ctx.inside(dim=1), Port(shape=("B", "S", hidden)), set(whole)
    return ModuleShardingSpec(
        params={path: {"tp": Replicate() if path in whole else _cut(path)} for path in paths},
        views=views,
        local_attrs=counts,
        in_src={"hidden_states": ctx.residual, "position_embeddings": angles},
        in_dst={"hidden_states": ctx.inside(dim=1), "position_embeddings": angles},
        out_names=("output", None),
        out_src={"output": ctx.inside(dim=1, tp=Partial())},
        out_dst={"output": ctx.residual},
        ports={"hidden_states": port, "output": port},
    )


def _cut(path: str) -> Placement:
    return Shard(1) if path == "o_proj.weight" else Shard(0)


def _output_bias(paths: Iterable[str]) -> dict[str, View]:
    return {path: FirstRank() for path in paths if path == "o_proj.bias"}


def _hidden(info: ModuleInfo, ctx: LayoutContext) -> int:
    return ctx.parameters(info)["o_proj.weight"].shape[0]
