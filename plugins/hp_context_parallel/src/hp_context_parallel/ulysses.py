"""ulysses: heads for tokens. A rank attends with a part of the heads over the whole sequence.

Legend: B batch, N query heads, K key-value heads, S tokens of this rank, D head dim, V value width, U degree.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from hp_context_parallel.blocks import Kernel
from hp_context_parallel.context import Context, attend_to
from hp_context_parallel.documents import Spans
from hp_context_parallel.legality import heads_fit
from hp_context_parallel.rectangles import runs
from hp_context_parallel.transport import exchange
from hp_core.applier.collectives import all_gather
from hp_core.contracts import KeyValue
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup


class Ulysses(Context):
    """Queries, keys and values are exchanged to whole sequences of fewer heads, the output back."""

    def attend(
        self, query: Tensor, kv: KeyValue, *, window: int | None, documents: tuple[Spans, ...] | None, kernel: Kernel
    ) -> Tensor:
        """Return [B, N, S, V]."""
        whole = runs([(0, query.shape[2] * self.axis.size)])

        def inside(query: Tensor, kv: KeyValue) -> Tensor:
            return attend_to(query, kv, queries=whole, keys=whole, window=window, documents=documents, kernel=kernel)

        return with_fewer_heads(query, kv, axis=self.axis, attention=inside)


def with_fewer_heads(
    query: Tensor, kv: KeyValue, *, axis: AxisGroup, attention: Callable[[Tensor, KeyValue], Tensor]
) -> Tensor:
    """Return [B, N, S, V]: ``attention`` of N / U heads over the tokens of all ranks of ``axis``, brought back.

    Key-value heads are cut like query heads; fewer of them than ranks are copied, so that each rank gets the one that its
    query heads use. Latents have no heads: they are gathered, and each rank expands its own heads from them. HP550: heads
    that cannot be shared.
    """
    heads, kv_heads = query.shape[1], 0 if kv.head_dim is None else kv.compact[0].shape[kv.head_dim]
    if not heads_fit(heads, kv_heads, degree=axis.size):
        what = f"{heads} query heads and {kv_heads} key-value heads cannot be shared among {axis.size} ranks"
        raise PlanError(
            "HP550", what, expected=f"heads divisible by {axis.name} = {axis.size}, or key-value heads that divide it"
        )
    if kv.head_dim is None:
        query, kv = exchange(query, cut=1, join=2, axis=axis), _latents(kv, axis)
    else:
        query, kv = _heads(query, kv, kv.head_dim, axis)
    return exchange(attention(query, kv), cut=2, join=1, axis=axis)


def _latents(kv: KeyValue, axis: AxisGroup) -> KeyValue:
    """Return the latents of all tokens, and the weights that expand this rank's heads from them."""
    compact = tuple(all_gather(part, dim=kv.seq_dim, axis=axis, backward="reduce_scatter") for part in kv.compact)
    weights = tuple(weight.chunk(axis.size)[axis.rank] for weight in kv.weights)
    return attrs.evolve(kv, compact=compact, weights=weights)


def _heads(query: Tensor, kv: KeyValue, head_dim: int, axis: AxisGroup) -> tuple[Tensor, KeyValue]:
    """Exchange queries, keys and values, in one piece where they have one shape but for the number of heads."""
    compact = [_copied(part, head_dim, axis) for part in kv.compact]
    tensors = [query, *compact]
    alike = {tuple(size for dim, size in enumerate(part.shape) if dim != 1) for part in tensors}
    if (head_dim, kv.seq_dim) != (1, 2) or len(alike) > 1:
        query = exchange(query, cut=1, join=2, axis=axis)
        parts = tuple(exchange(part, cut=head_dim, join=kv.seq_dim, axis=axis) for part in compact)
        return query, attrs.evolve(kv, compact=parts)
    shares = [part.shape[1] // axis.size for part in tensors]
    by_rank = zip(*(part.split(share, 1) for part, share in zip(tensors, shares, strict=True)), strict=True)
    together = torch.cat([part for parts in by_rank for part in parts], 1)
    query, *others = exchange(together, cut=1, join=2, axis=axis).split(shares, 1)
    return query, attrs.evolve(kv, compact=tuple(others))


def _copied(part: Tensor, head_dim: int, axis: AxisGroup) -> Tensor:
    """Return as many heads as there are ranks where there are fewer."""
    heads = part.shape[head_dim]
    return part if heads % axis.size == 0 else part.repeat_interleave(axis.size // heads, head_dim)
