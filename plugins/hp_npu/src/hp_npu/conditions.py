"""Where each kernel applies: the limits that torch_npu 2.13 documents for its operators. Torch-free.

A fact that a component does not state counts as met: the operator itself refuses what it cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_npu.limits import (
    ATTENTION_HEADS,
    ATTENTION_WIDTH,
    DTYPES,
    GROUPS,
    INNER,
    LSE_FEATURES,
    ROTARY_SIZE,
    ROTARY_WIDTH,
    ROUTED,
    SEQUENCE,
    TOP_K,
)

Facts = Mapping[str, Any]


def dtype(facts: Facts) -> bool:
    """Return whether the module computes in a dtype that the operators take: float64 they do not."""
    return facts["compute"] in DTYPES


def rotary(facts: Facts) -> bool:
    """Return whether the rotated width is even and below the operator's limit, and batch and heads are too."""
    known = facts["attributes"]
    width, heads = known.get("rotary_dim", known.get("head_dim", 2)), known.get("num_heads", 0) // facts["tp"]
    return dtype(facts) and width % 2 == 0 and width < ROTARY_WIDTH and max(facts["batch"], heads) < ROTARY_SIZE


def attention(facts: Facts) -> bool:
    """Return whether heads are few and narrow enough, and sequences short enough, for the fused attention."""
    return _attention(facts, width=ATTENTION_WIDTH)


def attention_with_lse(facts: Facts) -> bool:
    """Return the same where the backward needs room for :data:`LSE_FEATURES` more features in every head."""
    return _attention(facts, width=ATTENTION_WIDTH - LSE_FEATURES)


def grouped_matmul(facts: Facts) -> bool:
    """Return whether there are few enough groups, and every matrix is narrow enough."""
    sides = [side for shape in facts["parameters"].values() for side in shape[1:]]
    return dtype(facts) and facts["attributes"].get("num_experts", 0) <= GROUPS and max(sides, default=0) < INNER


def routing(facts: Facts) -> bool:
    """Return whether a token has few enough experts, and a micro-batch few enough choices."""
    choices = facts["attributes"].get("top_k", 1)
    return dtype(facts) and choices <= TOP_K and facts["batch"] * facts["sequence"] * choices < ROUTED


def _attention(facts: Facts, *, width: int) -> bool:
    known = facts["attributes"]
    latent = [known[name] + known["rotary_dim"] for name in ("plain_dim", "latent_dim") if name in known]
    heads = known.get("num_heads", 0) // facts["tp"]
    narrow = max(latent, default=known.get("head_dim", 0)) <= width
    narrow = narrow and known.get("value_dim", 0) <= min(latent, default=width)  # values no wider than keys
    return dtype(facts) and narrow and heads <= ATTENTION_HEADS and facts["sequence"] <= SEQUENCE
