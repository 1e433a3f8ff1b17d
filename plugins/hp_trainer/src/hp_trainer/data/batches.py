"""From windows to tensors: what a model is called with.

Legend: B windows of a micro-batch, S sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from hp_trainer.data.tokens import Tokens

IGNORED = -100


@attrs.frozen(kw_only=True, eq=False)
class MicroBatch:
    """One call of the model: int64 tensors [B, S]; ``labels`` are already shifted, -100 where nothing is predicted."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor


def token_row(tokens: Tokens) -> Tensor:
    """Return ``tokens`` as a 1-D tensor that shares their memory (uint8 or int32)."""
    return torch.frombuffer(tokens, dtype=torch.uint8 if isinstance(tokens, bytearray) else torch.int32)


def micro_batch(row: Tensor, *, windows: Sequence[int | None], sequence: int, device: torch.device) -> MicroBatch:
    """Return the windows of ``row`` as one micro-batch; None is filling that is run but not counted (all labels ignored)."""
    spans = torch.stack([_window(row, window or 0, sequence) for window in windows]).to(device=device, dtype=torch.int64)
    labels = spans[:, 1:].clone()
    for index, window in enumerate(windows):
        if window is None:
            labels[index] = IGNORED
    positions = torch.arange(sequence, device=device).expand(len(windows), sequence)
    return MicroBatch(input_ids=spans[:, :-1].contiguous(), labels=labels, position_ids=positions)


def _window(row: Tensor, window: int, sequence: int) -> Tensor:
    return row[window * sequence : window * sequence + sequence + 1]
