"""Seeded faults: each is a mistake that somebody makes in this field, put into one rank's code, and the cell that must see it.

A fault is a context manager that lives in a forked rank only. Most change one entry of the plan, the rest replace one
function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import hp_components.compiled.experts
import hp_components.expert_mlp
import hp_components.linear_cross_entropy
import hp_components.token_losses
import hp_core.applier.collectives
import hp_core.applier.gradients
import hp_core.applier.units
import hp_core.applier.view
import hp_core.testing.subject
import hp_expert_parallel.contexts
import hp_expert_parallel.transport
from hp_core.contracts import BoundaryPlan, BuildPlan, FirstRank, HeadSlice, Partial, Replicate
from hp_core.contracts.plan import CollectivePlan
from hp_core.mesh.context import AxisGroup

Fault = Callable[[], AbstractContextManager[Any]]


@attrs.frozen(kw_only=True)
class Mutation:
    """A fault and the name of the cell that turns red."""

    name: str
    cell: str
    fault: Fault


def planned(edit: Callable[[BuildPlan], BuildPlan]) -> Fault:
    """Return the fault of applying an edited plan."""

    def start() -> AbstractContextManager[Any]:
        original = hp_core.testing.subject.apply

        def apply(model: nn.Module, plan: BuildPlan, *arguments: Any, **keywords: Any) -> nn.Module:
            edited = edit(plan)
            assert edited != plan, "the fault changes nothing"
            return original(model, edited, *arguments, **keywords)

        return mock.patch.object(hp_core.testing.subject, "apply", apply)

    return start


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """Return the fault of one function replaced by ``make(original)``."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def both(*faults: Fault) -> Fault:
    """Return the fault that is all of ``faults``: which of two functions runs is the plan's choice."""

    @contextmanager
    def applied() -> Iterator[None]:
        with ExitStack() as stack:
            for fault in faults:
                stack.enter_context(fault())
            yield

    return applied


def gradient(fqn: str, placement: Partial | Replicate) -> Callable[[BuildPlan], BuildPlan]:
    """Return the edit that changes where one parameter's gradient is completed."""
    return lambda plan: attrs.evolve(
        plan,
        parameters=tuple(
            attrs.evolve(entry, gradient={"tp": placement}) if entry.fqn == fqn else entry for entry in plan.parameters
        ),
    )


def collective(
    fqn: str, port: str, change: Callable[[CollectivePlan], CollectivePlan | None]
) -> Callable[[BuildPlan], BuildPlan]:
    """Return the edit that changes (or, given None, drops) the collective of one port of one boundary."""

    def edited(boundary: BoundaryPlan) -> BoundaryPlan:
        if boundary.fqn != fqn:
            return boundary
        found = [change(entry) if entry.port == port else entry for entry in boundary.collectives]
        return attrs.evolve(boundary, collectives=tuple(entry for entry in found if entry is not None))

    return lambda plan: attrs.evolve(plan, boundaries=tuple(map(edited, plan.boundaries)))


def all_trainable(plan: BuildPlan) -> BuildPlan:
    """Train what the recipe freezes."""
    return attrs.evolve(plan, parameters=tuple(attrs.evolve(entry, trainable=True) for entry in plan.parameters))


def untied() -> AbstractContextManager[Any]:
    """Give the head its own copy of the tied weight."""
    original = hp_core.testing.subject.apply

    def apply(*arguments: Any, **keywords: Any) -> Any:
        model: Any = original(*arguments, **keywords)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    return mock.patch.object(hp_core.testing.subject, "apply", apply)


def per_rank_mean() -> AbstractContextManager[Any]:
    """Normalise the loss per part instead of once."""
    run = hp_core.testing.subject.Run
    return mock.patch.object(run, "loss", mean_of_means(run.loss))


def mean_of_means(original: Any) -> Any:
    """Divide by the tokens of the micro-batch instead of all tokens of the step, then average."""

    def loss(self: Any, rows: slice) -> Tensor:
        tokens, parts = self.reference.batch.rows(rows).tokens, self.mesh.data.size * self.cell.micro_batches
        return original(self, rows) * (self.reference.batch.tokens / tokens / parts)

    return loss


def clip_per_mesh(original: Any) -> Any:
    """Clip sharded and whole gradients apart, each by its own norm."""

    def clip(parameters: Any, *, max_norm: float) -> Tensor:
        parameters = list(parameters)
        sharded = [p for p in parameters if hasattr(p, "placements") and any(place.is_shard() for place in p.placements)]
        whole = [p for p in parameters if not any(p is other for other in sharded)]
        assert sharded
        assert whole
        norms = [original(group, max_norm=max_norm) for group in (sharded, whole)]
        return torch.stack(norms).norm()

    return clip


def first_kv_head(original: Any) -> Any:
    """Let every rank attend with the key-value heads in turn instead of those of its query heads."""

    def part(tensor: Tensor, view: Any, axis: AxisGroup) -> Tensor:
        if not isinstance(view, HeadSlice):
            found: Tensor = original(tensor, view, axis)
            return found
        size = tensor.shape[view.dim] // view.parts
        return tensor.narrow(view.dim, axis.rank % view.parts * size, size)

    return part


def bias_everywhere(original: Any) -> Any:
    """Add a row-wise bias on every rank, before the sum."""
    return lambda tensor, view, axis: tensor if isinstance(view, FirstRank) else original(tensor, view, axis)


def local_softmax(original: Any) -> Any:
    """Take the log-sum-exp over this rank's part of the vocabulary only."""

    def combine(self: Any, lse: Tensor, target: Tensor, *, rows: int) -> Any:
        return lse, original(self, lse, target, rows=rows)[1]

    return combine


def gathered_logits(original: Any) -> Any:
    """Feed logits that every rank holds whole to code that takes them for a summand."""
    return lambda x, *, dim, axis, backward: original(x, dim=dim, axis=axis, backward="reduce_scatter")


def router_in_bf16(original: Any) -> Any:
    """Let the router see its tokens in bf16 (in a bf16 run this drowns in the error of everything else)."""
    return lambda self, hidden_states: original(self, hidden_states.to(torch.bfloat16).to(hidden_states.dtype))


def no_scale(original: Any) -> Any:
    """Leave FSDP2 its own division by the number of ranks."""
    return lambda self, factor: None


@contextmanager
def averaged() -> Iterator[None]:
    """Average gradients over the ranks instead of summing them."""
    with (
        mock.patch.object(FSDPModule, "set_gradient_divide_factor", no_scale(None)),
        mock.patch.object(FSDPModule, "set_force_sum_reduction_for_comms", no_scale(None)),
    ):
        yield


def local_norm(original: Any) -> Any:
    """Forget that other ranks hold other elements."""
    return lambda buckets: {}


def twice(original: Any) -> Any:
    """Reduce a complete gradient once more on its way back through an all-reduce."""
    return staticmethod(lambda ctx, grad: (2 * grad, None))


def one_expert_a_row(original: Any) -> Any:
    """Let a rank that holds two of a token's experts send back what the first of them made."""

    def sums(y_RH: Tensor, there: Any, start_Y: Tensor) -> Tensor:
        if start_Y is not there.start_V:
            found: Tensor = original(y_RH, there, start_Y)
            return found
        return y_RH.index_select(0, there.place_P[start_Y])

    return sums


def gradient_times_ep(original: Any) -> Any:
    """Multiply the experts' own gradients by ep, as if they were means over its ranks."""

    def rows(x_RH: Tensor, gate_up: Tensor, down: Tensor, **keywords: Any) -> Tensor:
        gate_up, down = (2 * weight - weight.detach() for weight in (gate_up, down))
        found: Tensor = original(x_RH, gate_up, down, **keywords)
        return found

    return rows


def weights_without_gradient(original: Any) -> Any:
    """Send routing weights as if they were data."""
    return lambda hidden, weight, journey: original(hidden, weight.detach(), journey)


def another_ranks_weights(original: Any) -> Any:
    """Hand the weights of arrived rows out in the order of arrival instead of the experts'."""

    def dispatch(hidden: Tensor, weight: Tensor, journey: Any) -> tuple[Tensor, Tensor]:
        values, weights = original(hidden, weight, journey)
        return values, weights[journey.there.place_P]

    return dispatch


def all_tokens_from_every_rank(plan: BuildPlan) -> BuildPlan:
    """Without sequence parallelism let every tp rank send the tokens that all of them have: the experts see them tp times."""

    def edited(boundary: BoundaryPlan) -> BoundaryPlan:
        kept = () if boundary.fqn.endswith(".mlp.experts") else boundary.collectives
        return attrs.evolve(boundary, collectives=kept)

    return attrs.evolve(plan, boundaries=tuple(map(edited, plan.boundaries)))


LAYER = "model.layers.2"
MUTATIONS = [
    Mutation(
        name="one Partial gradient is not completed",
        cell="tp2",
        fault=planned(gradient(f"{LAYER}.self_attn.q_norm.weight", Replicate())),
    ),
    Mutation(
        name="a complete gradient is reduced again",
        cell="tp2 sp-off",
        fault=planned(gradient(f"{LAYER}.input_layernorm.weight", Partial())),
    ),
    Mutation(
        name="split instead of reduce-scatter behind an all-gather",
        cell="tp2",
        fault=planned(collective(f"{LAYER}.self_attn", "hidden_states", lambda entry: attrs.evolve(entry, backward="split"))),
    ),
    Mutation(
        name="reduce-scatter instead of split behind an all-gather of logits",
        cell="tp2 loss-parallel off",
        fault=replaced(hp_components.linear_cross_entropy, "all_gather", gathered_logits),
    ),
    Mutation(
        name="a varying body's input gradient is not completed",
        cell="tp2 sp-off",
        fault=planned(collective(f"{LAYER}.self_attn", "hidden_states", lambda entry: None)),
    ),
    Mutation(
        name="the router's gradient through the experts is not completed",
        cell="tp2 sp-off",
        fault=planned(collective(f"{LAYER}.mlp.experts", "top_k_weights", lambda entry: None)),
    ),
    Mutation(
        name="an all-reduce multiplies gradients by tp",
        cell="tp2 sp-off",
        fault=replaced(hp_core.applier.collectives._AllReduce, "backward", twice),
    ),
    Mutation(name="a mean of micro-batch means", cell="one process, four micro-batches", fault=per_rank_mean),
    Mutation(name="a mean of rank means", cell="dp2", fault=per_rank_mean),
    Mutation(name="FSDP2 averages", cell="fsdp2", fault=averaged),
    Mutation(name="FSDP2 averages replicas", cell="hsdp2x2", fault=averaged),
    Mutation(name="clip per mesh", cell="tp2", fault=replaced(hp_core.testing.subject, "clip_gradients", clip_per_mesh)),
    Mutation(
        name="the norm of this rank's shards", cell="fsdp2", fault=replaced(hp_core.applier.gradients, "_members", local_norm)
    ),
    Mutation(
        name="log-sum-exp of a part of the vocabulary",
        cell="tp2",
        fault=replaced(hp_components.token_losses.Vocabulary, "combine", local_softmax),
    ),
    Mutation(
        name="a row-wise bias counts tp times", cell="tp2", fault=replaced(hp_core.applier.view, "_part", bias_everywhere)
    ),
    Mutation(
        name="another rank's key-value head",
        cell="tp4 with 2 kv heads",
        fault=replaced(hp_core.applier.view, "_part", first_kv_head),
    ),
    Mutation(
        name="the router computes in bf16", cell="tp2 fp32", fault=replaced(Qwen3MoeTopKRouter, "forward", router_in_bf16)
    ),
    Mutation(name="a tie is broken", cell="one process, tied", fault=untied),
    Mutation(
        name="dedup drops one of two experts of a rank",
        cell="ep2",
        fault=replaced(hp_expert_parallel.transport, "row_sums", one_expert_a_row),
    ),
    Mutation(
        name="expert gradients are multiplied by ep",
        cell="ep2",
        fault=both(
            replaced(hp_components.expert_mlp, "expert_rows", gradient_times_ep),
            replaced(hp_components.compiled.experts, "expert_rows", gradient_times_ep),
        ),
    ),
    Mutation(
        name="routing weights lose their gradient on the way",
        cell="ep2 all_to_all",
        fault=replaced(hp_expert_parallel.contexts, "dispatch", weights_without_gradient),
    ),
    Mutation(
        name="rows are weighted in the order of arrival",
        cell="ep4 over tp2 fsdp2",
        fault=replaced(hp_expert_parallel.contexts, "dispatch", another_ranks_weights),
    ),
    Mutation(
        name="every tp rank sends the same tokens",
        cell="ep2 tp2 sp-off",
        fault=planned(all_tokens_from_every_rank),
    ),
    Mutation(name="frozen parameters are trained", cell="fsdp2 frozen", fault=planned(all_trainable)),
]
