"""allgather: every rank gets the compact keys and values that its queries see, and attends to them.

Legend: B batch, N query heads, S tokens of this rank, D head dim, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from torch import Tensor

from hp_context_parallel.blocks import Kernel
from hp_context_parallel.context import Context, attend_to
from hp_context_parallel.documents import Spans
from hp_context_parallel.rectangles import runs
from hp_context_parallel.transport import Needs, gather_visible
from hp_core.contracts import KeyValue
from hp_core.mesh.context import AxisGroup
from hp_core.mesh.sequence import Span


class AllGather(Context):
    """Keys and values travel compact, to those ranks alone that see them; gradients come back and are added up."""

    def attend(
        self, query: Tensor, kv: KeyValue, *, window: int | None, documents: tuple[Spans, ...] | None, kernel: Kernel
    ) -> Tensor:
        """Return [B, N, S, V]."""
        places = self.places(query.shape[2])
        return gathered(query, kv, places=places, axis=self.axis, window=window, documents=documents, kernel=kernel)


def gathered(
    query: Tensor,
    kv: KeyValue,
    *,
    places: Sequence[Sequence[Span]],
    axis: AxisGroup,
    window: int | None,
    documents: tuple[Spans, ...] | None,
    kernel: Kernel,
) -> Tensor:
    """Return the attention of this rank's queries to the keys of all ranks of ``axis``, whose tokens lie as ``places`` say."""
    needs = Needs.of(places, axis=axis, window=window)
    arrived = gather_visible(kv.compact, dim=kv.seq_dim, needs=needs)
    return attend_to(
        query,
        attrs.evolve(kv, compact=arrived),
        queries=runs(places[axis.rank]),
        keys=runs(needs.spans),
        window=window,
        documents=documents,
        kernel=kernel,
    )
