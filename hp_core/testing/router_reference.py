"""Router losses and loads in plain torch, one process: what :mod:`hp_core.applier.routers` is held against.

Legend: T tokens, E experts, K top-k, B rows; lists have one entry for each router.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from hp_core.contracts.adapter import ModelAdapter

Scoring = Literal["softmax", "sigmoid"]


@attrs.frozen(eq=False)
class Routed:
    """What the routers returned in a micro-batch: FQNs, logits [T, E] and choices [T, K] of each.

    Documents that are computed one by one follow each other, as in the rows that they are packed into.
    """

    fqns: list[str] = attrs.field(factory=list)
    logits: list[Tensor] = attrs.field(factory=list)
    choices: list[Tensor] = attrs.field(factory=list)


def hugging_face_loss(logits: Sequence[Tensor], *, top_k: int) -> Tensor:
    """Return the load-balancing loss of the Switch Transformer as Hugging Face computes it, all layers concatenated."""
    probability = torch.cat(tuple(logits)).softmax(-1)
    experts = probability.shape[1]
    chosen = functional.one_hot(probability.topk(top_k, dim=-1).indices, experts).to(probability.dtype)
    return experts * (chosen.mean(0) * probability.mean(0)).sum()


def sequence_loss(logits: Sequence[Tensor], choices: Sequence[Tensor], *, rows: int, scoring: Scoring) -> Tensor:
    """Return the sum over layers of the mean over sequences of the complementary loss of arXiv 2412.19437 (eq. 17-20).

    f_i = E / (K T) times the number of tokens that chose expert i, P_i the mean over tokens of its score, normalised over
    experts; the loss of a sequence is the sum of f_i P_i.
    """
    total = torch.zeros((), dtype=logits[0].dtype)
    for layer, chosen in zip(logits, choices, strict=True):
        scores = layer.softmax(-1) if scoring == "softmax" else layer.sigmoid()
        normal = scores / scores.sum(-1, keepdim=True)
        for score, choice in zip(normal.chunk(rows), chosen.chunk(rows), strict=True):
            tokens, experts = score.shape
            counts = torch.bincount(choice.flatten(), minlength=experts).to(score.dtype)
            share = counts * experts / (choice.shape[1] * tokens)
            total = total + (share * score.mean(0)).sum() / rows
    return total


def z_loss(logits: Sequence[Tensor]) -> Tensor:
    """Return the sum over layers of the mean over tokens of the squared log-sum-exp of the logits (arXiv 2202.08906, eq. 5)."""
    return torch.stack([layer.logsumexp(-1).square().mean() for layer in logits]).sum()


def router_objective(routed: Routed, asked: Mapping[str, Any], *, rows: int, scoring: Scoring) -> Tensor:
    """Return what the recipe's ``loss`` section ``asked`` adds to one micro-batch's mean loss."""
    aux, total = asked.get("aux") or {}, torch.zeros((), dtype=routed.logits[0].dtype)
    if aux.get("coefficient"):
        if aux.get("kind", "hf") == "hf":
            value = hugging_face_loss(routed.logits, top_k=routed.choices[0].shape[1])
        else:
            value = sequence_loss(routed.logits, routed.choices, rows=rows, scoring=scoring)
        total = total + aux["coefficient"] * value
    return total + asked["router_z"] * z_loss(routed.logits) if asked.get("router_z") else total


def loads(routed: Routed) -> dict[str, Tensor]:
    """Return how often each expert was chosen [E], by router."""
    found: dict[str, Tensor] = {}
    for fqn, logits, chosen in zip(routed.fqns, routed.logits, routed.choices, strict=True):
        counts = torch.bincount(chosen.flatten(), minlength=logits.shape[1])
        found[fqn] = found[fqn] + counts if fqn in found else counts
    return found


def move_biases(model: nn.Module, load: Mapping[str, Tensor], *, bias: str, rate: float) -> None:
    """Move each router's correction bias by ``rate`` towards the experts that got less than the mean."""
    for fqn, counts in load.items():
        buffer = model.get_buffer(f"{fqn}.{bias}")
        for expert, count in enumerate(counts.tolist()):
            mean = sum(counts.tolist()) / len(counts)
            buffer[expert] += rate * (1 if count < mean else -1 if count > mean else 0)


@contextmanager
def watch_routers(model: nn.Module, adapter: ModelAdapter) -> Iterator[Routed]:
    """Record what the model's routers, by the adapter's layout rules, return in the block: logits first, choices last."""
    found = Routed()
    patterns = [rule.match for rule in adapter.layout if rule.role == "router"]
    routers = {fqn: m for fqn, m in model.named_modules() if any(fnmatch.fnmatchcase(fqn, p) for p in patterns)}

    def record(fqn: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Sequence[Tensor]) -> None:
            if fqn in found.fqns:
                place = found.fqns.index(fqn)
                found.logits[place] = torch.cat((found.logits[place], output[0]))
                found.choices[place] = torch.cat((found.choices[place], output[-1]))
                return
            found.fqns.append(fqn)
            found.logits.append(output[0])
            found.choices.append(output[-1])

        return hook

    handles = [module.register_forward_hook(record(fqn)) for fqn, module in routers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
