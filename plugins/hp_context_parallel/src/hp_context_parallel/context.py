"""What the contexts of all cp protocols share: where tokens lie, whole sequences, heads for tokens, masks as rectangles.

Legend: B batch, N query heads, S tokens of this rank, D head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hp_context_parallel.blocks import Kernel, Rows, attend
from hp_context_parallel.documents import Documents, Spans
from hp_context_parallel.rectangles import Run, rectangles
from hp_context_parallel.transport import Gather, exchange
from hp_core.contracts import AttentionMask, CPContext, KeyValue, SequencePartition
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup, MeshContext
from hp_core.mesh.sequence import Span, sequence_spans


class Context(CPContext):
    """Transport over the mesh's cp axis in the order of tokens that the plan chose.

    ``options``: ``sequence_layout``, and ``sub_axes`` (name -> degree, outer first) where cp is divided.
    """

    def __init__(self, mesh: MeshContext, options: Mapping[str, Any]) -> None:
        self.axis: AxisGroup = mesh.axis("cp")
        self.layout: Any = options.get("sequence_layout") or "contiguous"
        self.inner = list(options["sub_axes"].values())[-1] if options.get("sub_axes") else 1
        self.documents = Documents(lambda ids: self.gather_sequence(ids, dim=1))

    def places(self, local_length: int) -> list[tuple[Span, ...]]:
        """Return the global spans that every rank holds, given the number of tokens of each."""
        length, cp = local_length * self.axis.size, self.axis.size
        return [sequence_spans(length, cp=cp, rank=rank, layout=self.layout, inner=self.inner) for rank in range(cp)]

    def partition(self, local_length: int) -> SequencePartition:
        """Return equal lengths; ``offset`` is the global place of the first token here."""
        size = self.axis.size
        offset = self.places(local_length)[self.axis.rank][0][0]
        return SequencePartition(
            lengths=(local_length,) * size, rank=self.axis.rank, offset=offset, global_length=local_length * size
        )

    def gather_sequence(self, tensor: Tensor, *, dim: int) -> Tensor:
        """Return the whole sequence in global order; the backward is a reduce-scatter."""
        return self.launch_gather_sequence(tensor, dim=dim).wait()

    def launch_gather_sequence(self, tensor: Tensor, *, dim: int) -> Gather:
        """Start a gather; ``wait()`` of the handle returns what :meth:`gather_sequence` does, once."""
        return Gather(tensor, dim=dim, axis=self.axis, order=lambda whole: self._in_order(whole, dim, tensor.shape[dim]))

    def sequence_to_head(self, tensor: Tensor, *, seq_dim: int, head_dim: int) -> Tensor:
        """Exchange the tokens of this rank with all heads for all tokens, ordered by rank, of a part of the heads."""
        return exchange(tensor, cut=head_dim, join=seq_dim, axis=self.axis)

    def head_to_sequence(self, tensor: Tensor, *, seq_dim: int, head_dim: int) -> Tensor:
        """Undo :meth:`sequence_to_head`."""
        return exchange(tensor, cut=seq_dim, join=head_dim, axis=self.axis)

    def attention(self, query: Tensor, kv: KeyValue, *, mask: AttentionMask, kernel: Kernel) -> Tensor:
        """Return [B, N, S, V] for the local queries [B, N, S, D]; ``kernel`` is ``attention_with_lse`` with its scale bound.

        The mask is causal, with a window and document ids [B, S] of the local tokens or without. HP554: another mask.
        """
        if not mask.causal or any(value is not None for value in (mask.positions, mask.key_positions, mask.key_document_ids)):
            what = "a mask that is not causal, or has positions of its own, is passed to attention over cp"
            raise PlanError("HP554", what, expected="causal, window and document_ids; the protocol knows where tokens lie")
        documents = None if mask.document_ids is None else self.documents.of(mask.document_ids)
        return self.attend(query, kv, window=mask.window, documents=documents, kernel=kernel)

    @abstractmethod
    def attend(
        self, query: Tensor, kv: KeyValue, *, window: int | None, documents: tuple[Spans, ...] | None, kernel: Kernel
    ) -> Tensor:
        """Return the attention of the local queries; ``documents`` are those of each row, in global places."""

    def _in_order(self, whole: Tensor, dim: int, local_length: int) -> Tensor:
        """Return what lies rank after rank along ``dim`` in global order."""
        spans = [span for place in self.places(local_length) for span in place]
        if spans == sorted(spans):
            return whole
        parts = whole.split([stop - start for start, stop in spans], dim)
        return torch.cat([part for _, part in sorted(zip(spans, parts, strict=True), key=lambda item: item[0])], dim)


def rows_of(queries: Sequence[Run], keys: Sequence[Run], *, window: int | None, documents: tuple[Spans, ...] | None) -> Rows:
    """Return the rectangles of every row of the batch; one entry for all rows where they are alike."""
    if documents is None:
        return [(slice(None), rectangles(queries, keys, window=window))]
    if len(set(documents)) == 1:
        return [(slice(None), rectangles(queries, keys, window=window, documents=documents[0]))]
    return [
        (slice(row, row + 1), rectangles(queries, keys, window=window, documents=spans)) for row, spans in enumerate(documents)
    ]


def attend_to(
    query: Tensor,
    kv: KeyValue,
    *,
    queries: Sequence[Run],
    keys: Sequence[Run],
    window: int | None,
    documents: tuple[Spans, ...] | None,
    kernel: Kernel,
) -> Tensor:
    """Return the attention of queries to keys that are here, both in memory as the runs say."""
    key, value = kv.expand(*kv.compact, *kv.weights)
    return attend(query, key, value, rows=rows_of(queries, keys, window=window, documents=documents), kernel=kernel)
