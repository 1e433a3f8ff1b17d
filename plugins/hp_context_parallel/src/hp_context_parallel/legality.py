"""What the protocols that exchange heads cannot do on a mesh. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_core.contracts import Problem
from hp_core.mesh.topology import Topology


def check_ulysses(options: Mapping[str, Any], config: Mapping[str, Any], topology: Topology) -> list[Problem]:
    """Return why heads cannot be exchanged over all of cp."""
    return _check_heads(config, topology, degree=topology.cp, name="mesh.cp")


def check_hybrid(options: Mapping[str, Any], config: Mapping[str, Any], topology: Topology) -> list[Problem]:
    """Return why heads cannot be exchanged over the inner axis of cp."""
    return _check_heads(config, topology, degree=options["sub_axes"]["cp_inner"], name="protocols.cp.inner")


def heads_fit(heads: int, kv_heads: int, *, degree: int) -> bool:
    """Return whether ranks can share heads: query heads divide, and key-value heads divide or are copied evenly.

    ``kv_heads`` 0: keys and values have no heads (latents), which every rank gathers.
    """
    return heads % degree == 0 and (kv_heads == 0 or kv_heads % degree == 0 or degree % kv_heads == 0)


def _check_heads(config: Mapping[str, Any], topology: Topology, *, degree: int, name: str) -> list[Problem]:
    if "num_attention_heads" not in config:
        return []
    heads = int(config["num_attention_heads"]) // topology.tp
    latent = config.get("kv_lora_rank") is not None
    kv_heads = 0 if latent else max(1, int(config.get("num_key_value_heads") or heads * topology.tp) // topology.tp)
    if heads_fit(heads, kv_heads, degree=degree):
        return []
    fitting = [n for n in range(1, topology.cp + 1) if topology.cp % n == 0 and heads_fit(heads, kv_heads, degree=n)]
    of = "latents" if latent else f"{kv_heads} key-value heads"
    return [
        Problem(
            what=f"{heads} query heads and {of} on a tp rank cannot be shared among {name} ({degree}) ranks",
            expected=f"{name} one of {', '.join(map(str, fitting))}: query heads divisible by it, key-value heads divisible "
            "or a divisor",
            where=name,
            fix=f"set {name} to {max(n for n in fitting if n < degree)}, or choose another protocol",
            code="HP502",
        )
    ]
