"""How Qwen3-MoE lies on the mesh, what its configuration must satisfy, and what it costs. Torch-free.

Legend: B batch, S sequence, T tokens (B x S), H hidden, D head dim, E experts, K top-k, I intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.contracts import (
    HeadSlice,
    Layout,
    LayoutContext,
    ModuleInfo,
    ModuleShardingSpec,
    Port,
    Problem,
    Replicate,
    Shard,
    indivisible,
)
from hp_core.contracts.placement import FirstRank, Partial, Placement, View
from hp_core.mesh.topology import Topology

Config = Mapping[str, Any]

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "max_position_embeddings",
)
ABOVE_ZERO = ("rms_norm_eps", "initializer_range")
REFUSED = {  # a key that must be false: why, and what to do
    "output_router_logits": (
        "the loss component does not add the router's auxiliary loss",
        "leave it out; auxiliary losses come with loss.aux",
    ),
}


def residual(ctx: LayoutContext) -> Layout:
    """The residual stream [B, S, H]."""
    return ctx.residual


def counts(config: Config) -> dict[str, int]:
    """How many modules each layout rule describes."""
    layers, moe = int(config["num_hidden_layers"]), sum(moe_layers(config))
    return {
        "embedding": 1,
        "rotary": 1,
        "input_norm": layers,
        "attention": layers,
        "post_attention_norm": layers,
        "router": moe,
        "experts": moe,
        "dense_mlp": layers - moe,
        "final_norm": 1,
        "head": 1,
    }


def moe_layers(config: Config) -> list[bool]:
    """For every layer, whether its MLP is a mixture of experts, as the model's own constructor decides it."""
    dense, step = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step") or 1)
    return [
        index not in dense and experts(config) > 0 and (index + 1) % step == 0
        for index in range(int(config["num_hidden_layers"]))
    ]


def experts(config: Config) -> int:
    """Number of routed experts; transformers writes the key under either name."""
    return int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])


def head_dim(config: Config) -> int:
    """Width of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rotary(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Angles of the whole (cp-local) sequence on every tp rank; ``x`` only lends its dtype."""
    angles = ctx.inside(dim=1)
    return ModuleShardingSpec(
        in_src={"position_ids": angles},
        in_dst={"position_ids": angles},
        out_names=("cos", "sin"),
        out_src={"cos": angles, "sin": angles},
        out_dst={"cos": angles, "sin": angles},
    )


def norm(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Each token by itself: computed where the token is. Under sequence parallelism the weight's gradient is Partial."""
    stream = ctx.residual
    return ModuleShardingSpec(
        params={"weight": {"tp": Replicate()}},
        in_src={"hidden_states": stream},
        in_dst={"hidden_states": stream},
        out_src={"output": stream},
        out_dst={"output": stream},
        ports={"hidden_states": ctx.hidden(), "output": ctx.hidden()},
        each_token=True,
    )


def attention(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Heads cut over tp. With fewer key-value heads than ranks, a rank computes the one that its query heads use."""
    views = _attention_views(info, ctx)
    angles = ctx.inside(dim=1)
    return ModuleShardingSpec(
        params={path: {"tp": _attention_placement(path, views)} for path in ctx.parameters(info)},
        views=views,
        in_src={"hidden_states": ctx.residual, "position_embeddings": angles},
        in_dst={"hidden_states": ctx.inside(dim=1), "position_embeddings": angles},
        out_names=("output", None),
        out_src={"output": ctx.inside(dim=1, tp=Partial())},
        out_dst={"output": ctx.residual},
        ports={"hidden_states": ctx.hidden(), "output": ctx.hidden()},
    )


def _attention_views(info: ModuleInfo, ctx: LayoutContext) -> dict[str, View]:
    tp, kv_heads = ctx.topology.tp, int(ctx.config["num_key_value_heads"])
    views: dict[str, View] = {}
    for path in ctx.parameters(info):
        if path.startswith(("k_proj.", "v_proj.")) and kv_heads < tp:
            views[path] = HeadSlice(dim=0, parts=kv_heads)
        elif path == "o_proj.bias":
            views[path] = FirstRank()
    return views


def _attention_placement(path: str, views: Mapping[str, View]) -> Placement:
    if path in views or path in ("q_norm.weight", "k_norm.weight"):
        return Replicate()
    return Shard(1) if path == "o_proj.weight" else Shard(0)


def router(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Each token by itself, flattened [T, H]; its logits and choices stay where the token is."""
    tokens, routes = ctx.tokens(dim=0), ("T", int(ctx.config["num_experts_per_tok"]))
    names = ("router_logits", "router_scores", "router_indices")
    return ModuleShardingSpec(
        params={"weight": {"tp": Replicate()}},
        in_src={"hidden_states": tokens},
        in_dst={"hidden_states": tokens},
        out_names=names,
        out_src=dict.fromkeys(names, tokens),
        out_dst=dict.fromkeys(names, tokens),
        ports={
            "hidden_states": ctx.hidden(flat=True),
            "router_logits": Port(shape=("T", experts(ctx.config)), dtype="float32"),
            "router_scores": Port(shape=routes, dtype="float32"),
            "router_indices": Port(shape=routes, dtype="int64"),
        },
        each_token=True,
    )


def dense_mlp(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Gate and up cut by columns, down by rows."""
    return ModuleShardingSpec(
        params={
            "gate_proj.weight": {"tp": Shard(0)},
            "up_proj.weight": {"tp": Shard(0)},
            "down_proj.weight": {"tp": Shard(1)},
        },
        in_src={"x": ctx.residual},
        in_dst={"x": ctx.inside(dim=1)},
        out_src={"output": ctx.inside(dim=1, tp=Partial())},
        out_dst={"output": ctx.residual},
        ports={"x": ctx.hidden(), "output": ctx.hidden()},
        each_token=True,
    )


def check_config(config: Config, topology: Topology) -> list[Problem]:
    """Return what cannot be a model (a size below 1, heads or experts that do not fit each other), else what the layout above
    cannot do: windows, router losses of the model itself, dropout on a cut sequence, sizes that do not divide.
    """
    wrong = _too_small(config) or _outside(config) or _contradictions(config)
    return wrong or [*_unsupported(config, topology), *_indivisible(config, topology)]


def _problem(key: str, value: Any, *, expected: str, fix: str = "", what: str = "") -> Problem:
    shown = str(value).lower() if isinstance(value, bool) else value
    return Problem(what=what or f"{key} is {shown}", expected=expected, where=f"model.config.{key}", fix=fix)


def _too_small(config: Config) -> list[Problem]:
    found = {key: config[key] for key in SIZES if config.get(key) is not None}
    wrong = [
        _problem(key, value, expected="at least 1" if type(value) is int else "an integer")
        for key, value in found.items()
        if type(value) is not int or value < 1
    ]
    if experts(config) < 0:
        wrong.append(_problem("num_experts", experts(config), expected="at least 1, or 0 for dense layers only"))
    return wrong


def _outside(config: Config) -> list[Problem]:
    """Return numbers outside their range: what divides or scales must be above 0, a dropout below 1, a layer one of them."""
    found = [_problem(key, config[key], expected="above 0") for key in ABOVE_ZERO if config.get(key, 1.0) <= 0]
    dropout, layers = config.get("attention_dropout") or 0.0, int(config["num_hidden_layers"])
    if not 0 <= dropout < 1:
        found.append(_problem("attention_dropout", dropout, expected="0 or more, below 1"))
    dense = config.get("mlp_only_layers") or ()
    if any(type(index) is not int or not 0 <= index < layers for index in dense):
        found.append(_problem("mlp_only_layers", list(dense), expected=f"indices of layers, 0 to {layers - 1}"))
    return found


def _contradictions(config: Config) -> list[Problem]:
    heads, kv_heads, found = int(config["num_attention_heads"]), int(config["num_key_value_heads"]), []
    if heads % kv_heads:
        expected = f"a divisor of num_attention_heads ({heads})"
        found.append(_problem("num_key_value_heads", kv_heads, expected=expected))
    if "hidden_size" in config and head_dim(config) % 2:
        expected = "an even number: rotary embeddings turn pairs"
        found.append(_problem("head_dim", head_dim(config), expected=expected))
    chosen = config.get("num_experts_per_tok", 1)
    if any(moe_layers(config)) and chosen > experts(config):
        found.append(_problem("num_experts_per_tok", chosen, expected=f"at most num_experts ({experts(config)})"))
    return found


def _unsupported(config: Config, topology: Topology) -> list[Problem]:
    found = []
    for key, why in REFUSED.items():
        if config.get(key):
            found.append(_problem(key, config[key], expected=f"false: {why[0]}", fix=why[1]))
    dropout = config.get("attention_dropout") or 0.0
    if dropout > 0 and max(topology.tp, topology.cp) > 1:
        found.append(
            _problem(
                "attention_dropout",
                dropout,
                what=f"attention_dropout is {dropout} with tp={topology.tp} cp={topology.cp}",
                expected="0 with tp or cp: ranks would drop different things than one process",
                fix="set attention_dropout to 0",
            )
        )
    return found


def _indivisible(config: Config, topology: Topology) -> list[Problem]:
    sizes = ["num_attention_heads", "vocab_size"]
    moe = moe_layers(config)
    sizes += ["moe_intermediate_size"] if any(moe) and topology.ep == 1 else []  # with ep experts are whole
    sizes += ["intermediate_size"] if not all(moe) else []
    found = [indivisible(name, config[name], axis="tp", degree=topology.tp) for name in sizes if config[name] % topology.tp]
    if any(moe) and experts(config) % topology.ep:
        found.append(indivisible("num_experts", experts(config), axis="ep", degree=topology.ep))
    kv_heads = int(config["num_key_value_heads"])
    if kv_heads >= topology.tp and kv_heads % topology.tp:
        found.append(indivisible("num_key_value_heads", kv_heads, axis="tp", degree=topology.tp))
    elif kv_heads < topology.tp and topology.tp % kv_heads:
        found.append(
            Problem(
                what=f"tp ({topology.tp}) must be divisible by num_key_value_heads ({kv_heads}) when it is larger",
                where="mesh.tp",
                fix=f"set mesh.tp to a multiple or a divisor of {kv_heads}",
                code="HP502",
            )
        )
    return found


def flops(config: Config, sequence: int) -> float:
    """Training FLOPs per token, forward and backward (three times the forward).

    Two per active matrix element (experts by top-k, head in, embedding out), and the two attention products over half the
    sequence, since each token attends to those before it.
    """
    hidden, width = int(config["hidden_size"]), head_dim(config)
    heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
    attention_matrices = hidden * width * (2 * heads + 2 * kv_heads)
    moe = experts(config) * hidden + int(config["num_experts_per_tok"]) * 3 * hidden * int(config["moe_intermediate_size"])
    dense = 3 * hidden * int(config["intermediate_size"])
    matrices = hidden * int(config["vocab_size"])
    for is_moe in moe_layers(config):
        matrices += attention_matrices + (moe if is_moe else dense)
    scores = int(config["num_hidden_layers"]) * 2 * heads * width * (sequence / 2)
    return 6.0 * (matrices + scores)
