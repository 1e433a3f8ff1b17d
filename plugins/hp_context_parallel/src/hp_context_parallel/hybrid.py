"""hybrid: heads are exchanged among neighbours (inner), and keys gathered or sent round among the groups of them (outer).

Legend: B batch, N query heads, S tokens of this rank, V value width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hp_context_parallel.allgather import gathered
from hp_context_parallel.blocks import Kernel
from hp_context_parallel.context import Context
from hp_context_parallel.documents import Spans
from hp_context_parallel.ring import in_ring
from hp_context_parallel.ulysses import with_fewer_heads
from hp_core.contracts import KeyValue
from hp_core.mesh.context import MeshContext
from hp_core.mesh.sequence import sequence_spans


class Hybrid(Context):
    """ulysses over ``cp_inner``, ``options["outer"]`` (ring or allgather) over ``cp_outer``.

    A group of inner ranks holds an outer part of the sequence in order, so after the exchange each of them has all of it.
    """

    def __init__(self, mesh: MeshContext, options: Mapping[str, Any]) -> None:
        super().__init__(mesh, options)
        self._outside = {"ring": in_ring, "allgather": gathered}[options.get("outer") or "ring"]
        axes = mesh.divide("cp", options["sub_axes"])
        self.outer_axis, self.inner_axis = axes["cp_outer"], axes["cp_inner"]

    def attend(
        self, query: Tensor, kv: KeyValue, *, window: int | None, documents: tuple[Spans, ...] | None, kernel: Kernel
    ) -> Tensor:
        """Return [B, N, S, V]."""
        outer, length = self.outer_axis.size, query.shape[2] * self.axis.size
        places = [sequence_spans(length, cp=outer, rank=rank, layout=self.layout) for rank in range(outer)]

        def inside(query: Tensor, kv: KeyValue) -> Tensor:
            return self._outside(
                query, kv, places=places, axis=self.outer_axis, window=window, documents=documents, kernel=kernel
            )

        return with_fewer_heads(query, kv, axis=self.inner_axis, attention=inside)
