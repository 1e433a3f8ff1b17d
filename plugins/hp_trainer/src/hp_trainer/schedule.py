"""The learning rate of a step, as a formula. Torch-free."""

from __future__ import annotations

import math

from hp_trainer.sections import Train


def learning_rate(step: int, *, train: Train) -> float:
    """Return the learning rate of ``step`` (from 1 to ``train.steps``).

    With ``s = step - 1``, W warm-up steps, T steps and the peak ``lr``:

    - ``s < W``: ``lr * (s + 1) / W``
    - constant: ``lr``
    - linear: ``lr * (1 - p)``
    - cosine: ``lr * (1 + cos(pi * p)) / 2``

    where ``p = (s - W) / (T - W)`` runs from 0 at the first step after the warm-up to just below 1 at the last.
    """
    peak, warmup, done = train.optimizer.lr, train.scheduler.warmup_steps, step - 1
    if done < warmup:
        return peak * (done + 1) / warmup
    progress = (done - warmup) / max(train.steps - warmup, 1)
    if train.scheduler.name == "linear":
        return peak * (1 - progress)
    if train.scheduler.name == "cosine":
        return peak * (1 + math.cos(math.pi * progress)) / 2
    return peak
