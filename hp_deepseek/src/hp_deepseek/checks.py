"""What a DeepSeek-V3 configuration must satisfy: a model that exists, and one that fits the mesh. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.contracts import Problem, indivisible
from hp_core.mesh.topology import Topology
from hp_deepseek.layout import dense_layers

Config = Mapping[str, Any]

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "max_position_embeddings",
)
ABOVE_ZERO = ("rms_norm_eps", "initializer_range", "routed_scaling_factor")
ROPES = ("default", "linear", "yarn", "llama3")  # whose angles depend on positions alone
ONLY = {  # keys of published configurations that the model's code does not read: the value that it computes
    "scoring_func": ("sigmoid", "the router's scores are sigmoids"),
    "topk_method": ("noaux_tc", "experts are chosen by corrected scores within the best groups"),
    "moe_layer_freq": (1, "every layer after the dense ones is a mixture of experts"),
}


def check_config(config: Config, topology: Topology) -> list[Problem]:
    """Return what cannot be a model (a size below 1, experts, groups or heads that do not fit each other), else what its code
    would not do as asked, or cannot do on this mesh: positions that depend on the length, dropout on a cut sequence, sizes
    that do not divide.
    """
    wrong = _too_small(config) or _outside(config) or _contradictions(config)
    return wrong or [*_unsupported(config, topology), *_indivisible(config, topology)]


def _problem(key: str, value: Any, *, expected: str, fix: str = "", what: str = "") -> Problem:
    return Problem(what=what or f"{key} is {_shown(value)}", expected=expected, where=f"model.config.{key}", fix=fix)


def _shown(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else value


def _too_small(config: Config) -> list[Problem]:
    found = [
        _problem(key, config.get(key), expected="at least 1" if type(config.get(key)) is int else "an integer")
        for key in SIZES
        if type(config.get(key)) is not int or config[key] < 1
    ]
    rank, dense = config.get("q_lora_rank"), config.get("first_k_dense_replace")
    if rank is not None and rank < 1:
        found.append(_problem("q_lora_rank", rank, expected="at least 1, or null for queries without a latent"))
    if dense is None or dense < 0:
        found.append(_problem("first_k_dense_replace", dense, expected="how many layers are dense: 0 or more"))
    return found


def _outside(config: Config) -> list[Problem]:
    """Return numbers outside their range: what divides or scales must be above 0, a dropout below 1."""
    found = [_problem(key, config[key], expected="above 0") for key in ABOVE_ZERO if config.get(key, 1.0) <= 0]
    dropout = config.get("attention_dropout") or 0.0
    return found if 0 <= dropout < 1 else [*found, _problem("attention_dropout", dropout, expected="0 or more, below 1")]


def _contradictions(config: Config) -> list[Problem]:
    found, heads, rotated = [], int(config["num_attention_heads"]), int(config["qk_rope_head_dim"])
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        expected = f"num_attention_heads ({heads}): every head has its own keys and values"
        found.append(_problem("num_key_value_heads", kv_heads, expected=expected, fix="set it to null"))
    if rotated % 2:
        found.append(_problem("qk_rope_head_dim", rotated, expected="an even number: rotary embeddings turn pairs"))
    return [*found, *(_groups(config) if dense_layers(config) < int(config["num_hidden_layers"]) else [])]


def _groups(config: Config) -> list[Problem]:
    experts, groups, kept, chosen = (
        int(config[key]) for key in ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")
    )
    if experts % groups:
        return [_problem("n_group", groups, expected=f"a divisor of n_routed_experts ({experts})")]
    size, found = experts // groups, []
    if size < 2:
        found.append(
            _problem("n_group", groups, expected=f"at most {experts // 2}: a group's score is of its two best experts")
        )
    if kept > groups:
        found.append(_problem("topk_group", kept, expected=f"at most n_group ({groups})"))
    elif chosen > kept * size:
        expected = f"at most {kept * size}, the experts of topk_group ({kept}) groups"
        found.append(_problem("num_experts_per_tok", chosen, expected=expected))
    return found


def _unsupported(config: Config, topology: Topology) -> list[Problem]:
    found = []
    rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
    if rope not in ROPES:
        expected = f"one of {', '.join(ROPES)}: others change with the length of what a rank sees"
        found.append(_problem("rope_parameters.rope_type", rope, expected=expected))
    for key, (only, why) in ONLY.items():
        if config.get(key, only) != only:
            found.append(_problem(key, config[key], expected=f"{only}: {why}", fix="leave it out"))
    if config.get("output_router_logits"):
        expected = "false: the loss component does not add the router's auxiliary loss"
        found.append(_problem("output_router_logits", True, expected=expected, fix="leave it out; use loss.aux"))
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
    """Return the sizes that tp or ep would cut and cannot; experts that move over ep stay whole, shared experts do not."""
    dense, layers = dense_layers(config), int(config["num_hidden_layers"])
    sizes = {key: int(config[key]) for key in ("num_attention_heads", "vocab_size")}
    if dense < layers:
        inner = int(config["moe_intermediate_size"])
        sizes |= {"moe_intermediate_size * n_shared_experts": inner * int(config["n_shared_experts"])}
        sizes |= {"moe_intermediate_size": inner} if topology.ep == 1 else {}
    sizes |= {"intermediate_size": int(config["intermediate_size"])} if dense else {}
    found = [indivisible(name, size, axis="tp", degree=topology.tp) for name, size in sizes.items() if size % topology.tp]
    experts = int(config["n_routed_experts"])
    if dense < layers and experts % topology.ep:
        found.append(indivisible("n_routed_experts", experts, axis="ep", degree=topology.ep))
    return found
