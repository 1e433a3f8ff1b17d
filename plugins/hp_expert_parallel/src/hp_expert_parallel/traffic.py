"""What a rank sends over ep where every expert is chosen as often as any other. Torch-free.

The formulas are those of docs/explanation/expert-transports.md, without what a rank keeps for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hp_core.contracts import Traffic
from hp_core.mesh.topology import Topology

EVEN = "expected, with choices even over the experts"
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def dedup(options: Mapping[str, Any], config: Mapping[str, Any], topology: Topology, tokens: tuple[int, int]) -> Traffic:
    """Return what ``dedup`` sends: a row for every rank that holds one of a token's experts."""
    return _sent(config, topology, tokens, rows=expected_ranks(_experts(config), ep=topology.ep, top_k=_chosen(config)))


def all_to_all(options: Mapping[str, Any], config: Mapping[str, Any], topology: Topology, tokens: tuple[int, int]) -> Traffic:
    """Return what ``all_to_all`` sends: a row for every choice."""
    return _sent(config, topology, tokens, rows=float(_chosen(config)))


def expected_ranks(experts: int, *, ep: int, top_k: int) -> float:
    """Return on how many of ``ep`` ranks the experts of a token lie on average, choices being even and distinct."""
    return ep * (1 - math.comb(experts - experts // ep, top_k) / math.comb(experts, top_k))


def _sent(config: Mapping[str, Any], topology: Topology, tokens: tuple[int, int], *, rows: float) -> Traffic:
    here = tokens[0] * tokens[1] / (topology.cp * topology.tp)  # tokens of a rank: tp ranks send different ones
    away = (topology.ep - 1) / topology.ep
    elements = round(2 * here * rows * int(config["hidden_size"]) * away)  # there and back
    pairs = here * _chosen(config) * away
    counts = 24 * (topology.ep - 1)
    return Traffic(
        forward=elements,
        backward=elements,
        forward_bytes=counts + round(8 * pairs),
        backward_bytes=round(4 * pairs),
        assumed=EVEN,
    )


def _chosen(config: Mapping[str, Any]) -> int:
    return int(config["num_experts_per_tok"])


def _experts(config: Mapping[str, Any]) -> int:
    return next(int(config[key]) for key in _EXPERTS if config.get(key))
