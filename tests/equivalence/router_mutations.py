"""Seeded faults in routers, their losses and their balance, and in the latents of attention."""

from __future__ import annotations

from typing import Any

from mutations import Mutation, gradient, planned, replaced
from torch import Tensor

import hp_core.applier.routers
from hp_core.contracts import Replicate
from hp_core.mesh.context import AxisGroup

ROUTERS = hp_core.applier.routers


def per_rank(original: Any) -> Any:
    """Make the loss of this rank's tokens alone, each rank its own."""
    return lambda value, axes: value


def summed_gradients(original: Any) -> Any:
    """Let the gradient of a sum over ranks be summed over ranks again."""

    def total(value: Tensor, *, axis: AxisGroup) -> Tensor:
        found: Tensor = original(value, axis=axis)
        return found + (axis.size - 1) * (value - value.detach()) if value.requires_grad else found

    return total


def counted_again(original: Any) -> Any:
    """Count what is recomputed."""
    return lambda: False


def equal_shares(original: Any) -> Any:
    """Weigh every micro-batch alike, whatever labels it has."""
    return lambda self, labels, tokens: original(self, labels * 0, tokens)


def towards_the_busy(original: Any) -> Any:
    """Move the biases the other way."""

    def finish(self: Any) -> Any:
        before = [self._model.get_buffer(fqn).clone() for fqn in self.plan.biases]
        step = original(self)
        for fqn, old in zip(self.plan.biases, before, strict=True):
            bias = self._model.get_buffer(fqn)
            bias.copy_(2 * old - bias)
        return step

    return finish


LATENT = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"
MUTATIONS = [
    Mutation(name="aux per rank", cell="tp2 aux", fault=replaced(ROUTERS, "_sum", per_rank)),
    Mutation(name="sequence aux per rank", cell="tp2 sequence aux, full recompute", fault=replaced(ROUTERS, "_sum", per_rank)),
    Mutation(
        name="a summed loss's gradient is summed again",
        cell="tp2 aux",
        fault=replaced(ROUTERS, "all_reduce", summed_gradients),
    ),
    Mutation(
        name="micro-batches weigh alike",
        cell="one process, aux, two micro-batches",
        fault=replaced(ROUTERS.Routers, "loss", equal_shares),
    ),
    Mutation(
        name="counters twice under recompute",
        cell="deepseek tp2 bias, full recompute",
        fault=replaced(ROUTERS, "recomputing", counted_again),
    ),
    Mutation(
        name="the correction bias moves the other way",
        cell="deepseek tp2 bias, full recompute",
        fault=replaced(ROUTERS.Routers, "finish", towards_the_busy),
    ),
    Mutation(
        name="a latent's gradient is of one rank's heads",
        cell="deepseek tp2",
        fault=planned(gradient(LATENT, Replicate())),
    ),
]
