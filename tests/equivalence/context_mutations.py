"""Seeded faults of context parallelism and packed documents."""

from __future__ import annotations

from typing import Any

import torch
from mutations import Mutation, replaced
from torch import Tensor

import hp_context_parallel.blocks
import hp_context_parallel.context
import hp_context_parallel.documents
import hp_context_parallel.ring
import hp_context_parallel.transport
import hp_core.testing.subject


def shifted_after_the_cut(original: Any) -> Any:
    """Cut labels that are not shifted yet, then shift each rank's part."""

    def cut(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        if not bool((tensor < 0).any()):
            return original(tensor, *arguments, **options)
        part = original(tensor.roll(1, 1), *arguments, **options).roll(-1, 1)
        part[:, -1] = -100
        return part

    return cut


def wider_window(original: Any) -> Any:
    """See one token more."""
    return lambda *runs, window, **options: original(*runs, window=None if window is None else window + 1, **options)


def one_document(original: Any) -> Any:
    """Take a row for one document."""
    return lambda ids: ((0, len(ids)),)


def largest_alone(original: Any) -> Any:
    """Merge by the largest log-sum-exp in place of that of all parts."""

    def merge(parts: Any) -> tuple[Tensor, Tensor]:
        total = torch.stack([lse for _, lse in parts]).amax(0)
        return sum(part * (lse - total).exp().unsqueeze(-1) for part, lse in parts), total

    return merge


def stays_away(original: Any) -> Any:
    """Forget what other ranks found of this rank's keys."""

    def home(self: Any) -> Any:
        original(self)
        return self._kept

    return home


def own_gradient_alone(original: Any) -> Any:
    """Keep the gradient of gathered keys where they were used."""

    def backward(ctx: Any, gradient: Tensor) -> Any:
        mine = ctx.needs.axis.rank
        sums = original(ctx, gradient)[0]
        own = torch.zeros_like(sums)
        places = hp_context_parallel.transport.runs(ctx.needs.spans)
        for run in ctx.needs.receive[mine]:
            own[run.slice] = gradient[hp_context_parallel.transport._found(places, run).slice]
        return own, None

    return staticmethod(backward)


MUTATIONS = [
    Mutation(
        name="labels are shifted after the cut",
        cell="cp2 allgather",
        fault=replaced(hp_core.testing.subject, "local_sequence", shifted_after_the_cut),
    ),
    Mutation(
        name="a window is off by one",
        cell="cp2 ulysses window",
        fault=replaced(hp_context_parallel.context, "rectangles", wider_window),
    ),
    Mutation(
        name="documents see each other",
        cell="cp2 allgather packed",
        fault=replaced(hp_context_parallel.documents, "_spans", one_document),
    ),
    Mutation(
        name="blocks are merged by the largest log-sum-exp",
        cell="cp2 allgather",
        fault=replaced(hp_context_parallel.blocks, "merge", largest_alone),
    ),
    Mutation(
        name="a ring's gradients do not come home",
        cell="cp2 ring",
        fault=replaced(hp_context_parallel.ring._Homeward, "home", stays_away),
    ),
    Mutation(
        name="gradients of gathered keys are not added up",
        cell="cp2 allgather",
        fault=replaced(hp_context_parallel.transport._GatherVisible, "backward", own_gradient_alone),
    ),
]
