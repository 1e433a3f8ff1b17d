"""What a rank sends over cp for one attention: the formulas of docs/explanation/context-parallelism.md. Torch-free.

Legend: B batch, S tokens of the whole sequence, N query heads and K key-value heads of a tp rank, D head dim, V value width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from hp_core.contracts import Traffic
from hp_core.mesh.topology import Topology

Options = Mapping[str, Any]
Config = Mapping[str, Any]
_WINDOW = "at most: a window sends less"


@attrs.frozen(kw_only=True)
class Attention:
    """The sizes of one attention on a tp rank; ``latent``: width of what all heads share, 0 where heads have their own."""

    batch: int
    sequence: int
    heads: int
    kv_heads: int
    query: int
    value: int
    latent: int = 0

    def kv(self, heads: int) -> int:
        """Elements of keys and values of all tokens with so many key-value heads."""
        return self.batch * self.sequence * (self.latent or (self.query + self.value) * heads)


def allgather(options: Options, config: Config, topology: Topology, tokens: tuple[int, int]) -> Traffic:
    """Return what ``allgather`` sends."""
    found = _attention(config, topology, tokens)
    return _per_rank(gathered(found.kv(found.kv_heads), topology.cp, options), ranks=topology.cp, config=config)


def ring(options: Options, config: Config, topology: Topology, tokens: tuple[int, int]) -> Traffic:
    """Return what ``ring`` sends."""
    found = _attention(config, topology, tokens)
    return _per_rank(around(found.kv(found.kv_heads), topology.cp, options), ranks=topology.cp, config=config, window=False)


def ulysses(options: Options, config: Config, topology: Topology, tokens: tuple[int, int]) -> Traffic:
    """Return what ``ulysses`` sends."""
    one = exchanged(_attention(config, topology, tokens), topology.cp)
    return _per_rank((one, one), ranks=topology.cp, config=config, window=False)


def hybrid(options: Options, config: Config, topology: Topology, tokens: tuple[int, int]) -> Traffic:
    """Return what ``hybrid`` sends: ``ulysses`` over the inner ranks, and outside what is left of the heads."""
    found, inner = _attention(config, topology, tokens), list(options["sub_axes"].values())[-1]
    outer, inside = topology.cp // inner, exchanged(found, inner)
    outside: Callable[..., tuple[float, float]] = gathered if options.get("outer") == "allgather" else around
    whole = found.kv(0) * inner if found.latent else found.kv(max(found.kv_heads, inner))
    forward, backward = outside(whole, outer, options)
    return _per_rank((inside + forward, inside + backward), ranks=topology.cp, config=config, window=outside is gathered)


def gathered(kv: int, ranks: int, options: Options) -> tuple[float, float]:
    """Return what all ranks send to give each the keys that it sees, forward and backward."""
    share = 0.75 if options.get("sequence_layout") == "zigzag" else 0.5
    return share * (ranks - 1) * kv, share * (ranks - 1) * kv


def around(kv: int, ranks: int, options: Options) -> tuple[float, float]:
    """Return what all ranks send to pass keys round, and in the backward again with their gradients."""
    return (ranks - 1) * kv, 2 * (ranks - 1) * kv


def exchanged(found: Attention, ranks: int) -> float:
    """Return what all ranks send to exchange tokens for heads and back, in one direction of the step."""
    tokens, away = found.batch * found.sequence, (ranks - 1) / ranks
    queries = away * tokens * found.heads * (found.query + found.value)  # and outputs, which come back
    return queries + ((ranks - 1) * found.kv(0) if found.latent else away * found.kv(max(found.kv_heads, ranks)))


def _per_rank(both: tuple[float, float], *, ranks: int, config: Config, window: bool = True) -> Traffic:
    slides = bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", True))
    forward, backward = (round(total / ranks) for total in both)
    return Traffic(forward=forward, backward=backward, assumed=_WINDOW if window and slides else "")


def _attention(config: Config, topology: Topology, tokens: tuple[int, int]) -> Attention:
    heads, rank = int(config["num_attention_heads"]), config.get("kv_lora_rank")
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    latent = 0 if rank is None else int(rank) + int(config["qk_rope_head_dim"])
    return Attention(
        batch=tokens[0],
        sequence=tokens[1],
        heads=heads // topology.tp,
        kv_heads=max(1, kv_heads // topology.tp),
        query=int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"]) if latent else width,
        value=int(config["v_head_dim"]) if latent else width,
        latent=latent,
    )
