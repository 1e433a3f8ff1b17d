"""From windows to tensors: what a model is called with.

Legend: B windows of a micro-batch, S sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from hp_trainer.data.corpus import Part

IGNORED = -100


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """One call of the model: int64 tensors [B, S]; ``labels`` are already shifted, -100 where nothing is predicted.

    ``document_ids``: which document a token belongs to, where documents are packed; positions then start again with each.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return the micro-batch with ``change`` done to every tensor."""
        return MicroBatch(
            input_ids=change(self.input_ids),
            labels=change(self.labels),
            position_ids=change(self.position_ids),
            document_ids=None if self.document_ids is None else change(self.document_ids),
        )


@attrs.frozen(kw_only=True, eq=False)
class TokenRow:
    """The tokens of a part of the corpus, 1-D (uint8 or int32), and the places at which documents begin, where it is packed."""

    tokens: Tensor
    starts: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def label_count(self, windows: Sequence[int | None], *, sequence: int) -> int:
        """Return how many labels of the windows count; filling (None) has none."""
        real = torch.tensor([window for window in windows if window is not None], dtype=torch.int64)
        if self.starts is None:
            return len(real) * sequence
        first = real * sequence  # labels are the tokens after it; one that begins a document is predicted by nobody
        begun = torch.searchsorted(self.starts, torch.stack((first, first + sequence)), right=True)
        return int(len(real) * sequence - (begun[1] - begun[0]).sum())


def token_row(part: Part) -> TokenRow:
    """Return ``part`` as tensors; the tokens share its memory."""
    dtype = torch.uint8 if isinstance(part.tokens, bytearray) else torch.int32
    starts = None if part.starts is None else torch.tensor(part.starts, dtype=torch.int64)
    return TokenRow(tokens=torch.frombuffer(part.tokens, dtype=dtype), starts=starts)


def micro_batch(
    row: TokenRow, *, windows: Sequence[int | None], sequence: int, device: torch.device, length: int | None = None
) -> MicroBatch:
    """Return the windows of ``row`` as one micro-batch; None is filling that is run but not counted (all labels ignored).

    ``length``: tokens of a row of the batch, ``sequence`` or more; what is added has no labels.
    """
    spans = torch.stack([_window(row.tokens, window or 0, sequence) for window in windows]).to(torch.int64)
    firsts = torch.tensor([(window or 0) * sequence for window in windows]).unsqueeze(1)
    labels, positions, ids = spans[:, 1:].clone(), torch.arange(sequence).expand(len(windows), sequence), None
    if row.starts is not None:
        places = firsts + torch.arange(sequence + 1)
        ids = torch.searchsorted(row.starts, places, right=True)
        labels[ids[:, 1:] != ids[:, :-1]] = IGNORED
        ids = ids[:, :-1]
        positions = places[:, :-1] - torch.maximum(row.starts[ids - 1], firsts)
    for index, window in enumerate(windows):
        if window is None:
            labels[index] = IGNORED
    batch = MicroBatch(input_ids=spans[:, :-1].contiguous(), labels=labels, position_ids=positions, document_ids=ids)
    return _padded(batch, length or sequence).each(lambda tensor: tensor.to(device))


def _window(tokens: Tensor, window: int, sequence: int) -> Tensor:
    return tokens[window * sequence : window * sequence + sequence + 1]


def _padded(batch: MicroBatch, length: int) -> MicroBatch:
    """Return rows of ``length``: what is added lies behind everything, without labels, in a document of its own."""
    more = length - batch.labels.shape[1]
    if not more:
        return batch
    last = batch.position_ids[:, -1:]
    after = torch.arange(more).expand(len(last), more) if batch.document_ids is not None else last + 1 + torch.arange(more)
    return MicroBatch(
        input_ids=functional.pad(batch.input_ids, (0, more)),
        labels=functional.pad(batch.labels, (0, more), value=IGNORED),
        position_ids=torch.cat((batch.position_ids, after), 1),
        document_ids=None if batch.document_ids is None else functional.pad(batch.document_ids, (0, more)),
    )
