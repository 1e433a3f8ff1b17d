"""The held-out loss: the same number on every mesh."""

from __future__ import annotations

import torch

from hp_trainer.data.batches import IGNORED
from hp_trainer.data.windows import window_count
from hp_trainer.session import Session


def evaluate(session: Session) -> float | None:
    """Return the mean loss (nats per token) over the held-out windows, None without labels in a held-out part.

    Windows are read in file order: the first ``eval.batches`` global batches, or all. Every rank makes the same number of
    calls; where the windows run out it runs filling that is not counted.
    """
    if session.held_out_row is None:
        return None
    losses = torch.zeros((), dtype=torch.float64, device=session.mesh.device)
    tokens = 0
    session.model.eval()
    with torch.no_grad():
        for windows in held_out_calls(session):
            batch = session.batch(session.held_out_row, windows=windows)
            losses += session.token_losses(batch).double().sum()
            tokens += int((batch.labels != IGNORED).sum())
    session.model.train()
    total, count = session.total(losses, tokens)
    return total / count if count else None


def held_out_calls(session: Session) -> list[list[int | None]]:
    """Return the windows of each call that this rank makes, in order; None is filling."""
    assert session.held_out_row is not None
    train, ranks, rank = session.job.train, session.mesh.data.size, session.mesh.data.rank
    count = window_count(len(session.held_out_row), sequence=train.sequence_length)
    if train.eval.batches:
        count = min(count, train.eval.batches * train.global_batch_size)
    size = train.micro_batch_size
    firsts = range(rank * size, -(-count // (ranks * size)) * ranks * size, ranks * size)
    return [[window if window < count else None for window in range(first, first + size)] for first in firsts]
