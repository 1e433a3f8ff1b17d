"""Routers: losses that balance experts, loads, and the correction bias that a step moves, for any loop and any mesh.

Statistics are taken where a router's tokens are and summed over all ranks that route other tokens of the same micro-batch,
with gradients through the sums: each rank's backward carries what its own tokens contribute, so that a gradient that is
summed over ranks holds the loss once. All in at least fp32. Legend: L routers, T tokens, E experts, K top-k, B rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_core.applier.collectives import all_reduce
from hp_core.applier.derive import derive
from hp_core.applier.recompute import recomputing
from hp_core.contracts.plan import BuildPlan, RouterPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup, MeshContext
from hp_core.models.state import state_of, update

IGNORED = -100
OUTPUTS = ("router_logits", "router_indices")


@attrs.frozen(kw_only=True, eq=False)
class RouterStep:
    """What the routers did in one step; the same on every rank.

    - ``load`` [L, E]: how many tokens each expert was chosen by. ``imbalance``: the most a layer's busiest expert got, over
      the mean of its layer: 1 is even.
    - ``bias_move``, ``bias_size``: how far the correction biases moved, on average over experts (at most the rate), and the
      largest of them now; None where they are not moved.
    - ``aux``, ``z``: the losses without their coefficients, token-weighted over micro-batches; None where not asked for.
    """

    load: Tensor
    imbalance: float
    aux: float | None
    z: float | None
    bias_move: float | None = None
    bias_size: float | None = None


def router_loss(model: nn.Module, *, labels: Tensor, tokens: int) -> Tensor | float:
    """Return what the routers add to this micro-batch's objective, after its forward and before its backward; all ranks call.

    ``labels``: this rank's, as the model got them (-100 ignored); ``tokens``: label tokens of the whole step. A micro-batch
    weighs as many of them as it has. 0.0 where the recipe asks for no router loss. HP550: other labels than the forward's;
    HP551: the forward was without gradients.

    Example::

        losses = model(input_ids, position_ids=positions, hp_labels=labels).logits
        (losses.sum() / tokens + router_loss(model, labels=labels, tokens=tokens)).backward()
    """
    routers = _routers(model)
    return 0.0 if routers is None else routers.loss(labels, tokens)


def finish_router_step(model: nn.Module) -> RouterStep | None:
    """Move the correction biases by this step's loads, begin the next account; once a step, after the optimizer, on all ranks.

    A bias goes up by ``loss.bias_update_rate`` where an expert was chosen less than the mean of its layer, down where more
    (arXiv 2412.19437, section 2.1.2). None where the recipe asks nothing of routers.
    HP551: no forward with gradients came before.
    """
    routers = _routers(model)
    return None if routers is None else routers.finish()


def install_routers(model: nn.Module, plan: BuildPlan, mesh: MeshContext) -> None:
    """Let the planned routers keep account in ``model.hp.routers``; nothing where the recipe asks nothing of them."""
    if plan.routers is None:
        return
    specs = {boundary.fqn: boundary.spec for boundary in plan.boundaries}
    places = [tuple(specs[fqn].out_names.index(name) for name in OUTPUTS) for fqn in plan.routers.routers]
    account = Routers(model, plan.routers, mesh=mesh, outputs=places)
    for place, fqn in enumerate(plan.routers.routers):
        router = model.get_submodule(fqn)
        update(router, fqn, routers=account, router=place)
        derive(router, _watched)
    update(model, "", routers=account)
    derive(model, _begun)


@attrs.frozen(kw_only=True, eq=False)
class Statistics:
    """One router's sums over its own tokens of one forward.

    ``chosen`` and ``scores`` [E], or [B, E] by row: how often each expert is chosen, and the sum of its scores; ``z``: the sum
    of squared log-sum-exps; ``tokens``: T.
    """

    chosen: Tensor | None
    scores: Tensor | None
    z: Tensor | None
    tokens: int


class Routers:
    """The account of one model: the last forward's statistics, and this step's loads and losses."""

    def __init__(self, model: nn.Module, plan: RouterPlan, *, mesh: MeshContext, outputs: Sequence[tuple[int, ...]]) -> None:
        self.plan, self.mesh, self.outputs = plan, mesh, outputs
        self.rows = 1
        self._tokens = 0  # of the last forward, on this rank's part of the sequence
        tp = (mesh.axis("tp"),) if plan.tokens_cut else ()
        self._everywhere: tuple[AxisGroup, ...] = (mesh.tokens, *tp)
        self._along_rows: tuple[AxisGroup, ...] = (mesh.axis("cp"), *tp)
        self._model = model
        self._statistics: dict[int, Statistics] = {}
        self._loads: dict[int, Tensor] = {}
        self._values: dict[str, Tensor] = {}

    def watch(self, place: int, output: Sequence[Tensor]) -> None:
        """Take the statistics of one router's output; what is recomputed is computed again and not counted again."""
        if not torch.is_grad_enabled():
            return
        logits_TE, index_TK = (output[at] for at in self.outputs[place])
        self._tokens = logits_TE.shape[0] * (self.mesh.axis("tp").size if self.plan.tokens_cut else 1)
        found = statistics(self.plan, logits_TE, index_TK, rows=self.rows)
        if recomputing():
            return
        self._statistics[place] = found
        load_E = _counts(index_TK, logits_TE.shape[1])
        self._loads[place] = self._loads[place] + load_E if place in self._loads else load_E

    def loss(self, labels: Tensor, tokens: int) -> Tensor:
        """Return the losses of the last forward with their coefficients, times the micro-batch's share of the step's tokens."""
        found, self._statistics = self._statistics, {}
        if len(found) < len(self.plan.routers):
            what = f"{len(found)} of {len(self.plan.routers)} routers were run with gradients since their last loss"
            raise PlanError("HP551", what, expected="router_loss() once after every forward that is trained on")
        if labels.numel() != self._tokens:
            what = f"router_loss got labels of {labels.numel()} tokens, the forward had {self._tokens} on this rank"
            raise PlanError(
                "HP550", what, expected="the labels that the model got", fix="cut them as the tokens: local_sequence"
            )
        every = [found[place] for place in range(len(found))]
        count = _sum((labels != IGNORED).sum().to(torch.float64), (self.mesh.tokens,))
        share, total = count / tokens, torch.zeros((), device=labels.device)
        for name, coefficient, value in (
            ("aux", self.plan.aux_coefficient, self._aux(every)),
            ("z", self.plan.z_coefficient, self._z(every)),
        ):
            if value is not None:
                weighted = value * share.to(value.dtype)
                self._values[name] = self._values.get(name, 0.0) + weighted.detach()
                total = total + coefficient * weighted
        return total

    def finish(self) -> RouterStep:
        """Return what the step's routers did, and begin the next step."""
        if not self._loads:
            what = "the routers have counted nothing since their last step"
            raise PlanError("HP551", what, expected="finish_router_step() once after the forwards of a step")
        load_LE = torch.stack([self._loads[place] for place in range(len(self.plan.routers))])
        for axis in self._everywhere:
            if axis.group is not None:
                dist.all_reduce(load_LE, group=axis.group)
        move, size = self._move_biases(load_LE)
        busiest = load_LE.max(1).values / load_LE.double().mean(1)
        values, self._values, self._loads = self._values, {}, {}
        return RouterStep(
            load=load_LE,
            imbalance=float(busiest.max()),
            aux=float(values["aux"]) if "aux" in values else None,
            z=float(values["z"]) if "z" in values else None,
            bias_move=move,
            bias_size=size,
        )

    def _move_biases(self, load_LE: Tensor) -> tuple[float | None, float | None]:
        """Move each correction bias towards the mean load; return the mean move and the largest bias, None without biases."""
        if not self.plan.biases:
            return None, None
        moves, biases = [], []
        for fqn, load_E in zip(self.plan.biases, load_LE, strict=True):
            bias = self._model.get_buffer(fqn)
            towards = (load_E.sum() - load_E * load_E.shape[0]).sign()  # exact: the mean may be no integer
            moves.append(self.plan.bias_update_rate * towards.to(bias.dtype))
            bias += moves[-1]
            biases.append(bias)
        return float(torch.stack(moves).abs().mean()), float(torch.stack(biases).abs().max())

    def _aux(self, found: Sequence[Statistics]) -> Tensor | None:
        if self.plan.aux is None:
            return None
        chosen = torch.stack([_held(one.chosen) for one in found])
        scores = torch.stack([_held(one.scores) for one in found])
        if self.plan.aux == "hf":
            return self._hugging_face(chosen, scores, tokens=sum(one.tokens for one in found))
        return self._by_sequence(chosen, scores)

    def _hugging_face(self, chosen_LE: Tensor, scores_LE: Tensor, *, tokens: int) -> Tensor:
        """Return E times the sum over experts of the share of tokens that chose it and its mean score, over all layers."""
        chosen_E, scores_E = _sum(torch.stack((chosen_LE.sum(0), scores_LE.sum(0))), self._everywhere)
        count = tokens * self._parts(self._everywhere)
        return chosen_E.shape[0] * torch.sum(chosen_E / count * (scores_E / count))

    def _by_sequence(self, chosen_LBE: Tensor, scores_LBE: Tensor) -> Tensor:
        """Return the sum over layers of the mean over rows of the same, normalised so that even loads give 1."""
        chosen_LBE, scores_LBE = _sum(torch.stack((chosen_LBE, scores_LBE)), self._along_rows)
        slots_LB1 = chosen_LBE.sum(-1, keepdim=True)
        length_LB1 = scores_LBE.detach().sum(-1, keepdim=True)  # scores of a token add up to one
        balance_LB = chosen_LBE.shape[-1] * torch.sum(chosen_LBE / slots_LB1 * (scores_LBE / length_LB1), -1)
        return _sum(balance_LB.sum(), (self.mesh.data,)) / (balance_LB.shape[1] * self.mesh.data.size)

    def _z(self, found: Sequence[Statistics]) -> Tensor | None:
        """Return the sum over layers of the mean squared log-sum-exp of the logits (ST-MoE, arXiv 2202.08906)."""
        if not self.plan.z_coefficient:
            return None
        total = _sum(torch.stack([_held(one.z) for one in found]).sum(), self._everywhere)
        return total / (found[0].tokens * self._parts(self._everywhere))

    def _parts(self, axes: Sequence[AxisGroup]) -> int:
        return functools.reduce(lambda product, axis: product * axis.size, axes, 1)


def statistics(plan: RouterPlan, logits_TE: Tensor, index_TK: Tensor, *, rows: int) -> Statistics:
    """Return a router's sums, with gradients.

    ``hf`` is made of logits alone, as Hugging Face makes it: softmax, and its K largest. ``sequence`` of the router's own
    scores, normalised over experts, and of what it chose.
    """
    chosen = scores = None
    experts, top_k = logits_TE.shape[1], index_TK.shape[1]
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if plan.aux == "hf":
        best_TK = index_TK if plan.scoring == "softmax" else logits_TE.detach().topk(top_k, dim=-1).indices
        chosen, scores = _counts(best_TK, experts).to(logits_TE.dtype), logits_TE.softmax(-1).sum(0)
    elif plan.aux == "sequence":
        score_TE = logits_TE.softmax(-1) if plan.scoring == "softmax" else logits_TE.sigmoid()
        score_TE = score_TE / score_TE.sum(-1, keepdim=True)
        chosen = torch.stack([_counts(part, experts) for part in index_TK.chunk(rows)]).to(logits_TE.dtype)
        scores = score_TE.unflatten(0, (rows, -1)).sum(1)
    z = logits_TE.logsumexp(-1).square().sum() if plan.z_coefficient else None
    return Statistics(chosen=chosen, scores=scores, z=z, tokens=logits_TE.shape[0])


def _counts(index_TK: Tensor, experts: int) -> Tensor:
    index_N = index_TK.detach().reshape(-1)
    return index_N.new_zeros(experts, dtype=torch.int64).scatter_add_(0, index_N, torch.ones_like(index_N))


def _sum(value: Tensor, axes: Sequence[AxisGroup]) -> Tensor:
    """Return the sum over the ranks of ``axes``; the gradient of each rank's summand is its own."""
    return functools.reduce(lambda total, axis: all_reduce(total, axis=axis), axes, value)


def _held(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _routers(model: nn.Module) -> Routers | None:
    state = state_of(model)
    return None if state is None else state.routers


def _watched(cls: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = cls.forward(self, *args, **kwargs)
        state = self.__dict__["hp"]
        state.routers.watch(state.router, output)
        return output

    return {"forward": forward}


def _begun(cls: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        self.__dict__["hp"].routers.rows = next(value for value in given if value is not None).shape[0]
        return cls.forward(self, *args, **kwargs)

    return {"forward": forward}
