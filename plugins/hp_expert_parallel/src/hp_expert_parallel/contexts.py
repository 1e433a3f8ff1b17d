"""The two protocols as contexts of one job's ep group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from hp_core.contracts.protocol import DispatchedExperts, EPContext
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_expert_parallel.checks import check_choices, check_hidden, check_receipt, check_values, count_of_experts
from hp_expert_parallel.routes import order_choices, sent
from hp_expert_parallel.transport import Journey, combine, dispatch
from hp_expert_parallel.wire import Traffic, check_backend, exchange_counts


@attrs.define(eq=False)
class Receipt:
    """What ``combine`` needs of a dispatch: single-use, and of one context."""

    context: EPContext = attrs.field(repr=False)
    journey: Journey = attrs.field(repr=False)
    width: int
    dtype: torch.dtype
    used: bool = False


class Transport(EPContext):
    """Tokens to the ranks that own their experts, and back, over the borrowed ep group of ``mesh``; all ranks of it call.

    ``options``: ``num_experts``. Rank r owns the r-th run of them. HP502, HP551: a number that ep does not divide, or none;
    HP580: a backend without an all-to-all of unequal parts, which is asked once.
    """

    name: ClassVar[str]
    once: ClassVar[bool]

    def __init__(self, mesh: MeshContext, options: Mapping[str, Any]) -> None:
        self._axis = mesh.axis("ep")
        self._device = mesh.device
        self._experts = count_of_experts(self.name, options, axis=self._axis)
        check_backend(self._axis, device=mesh.device, name=self.name)

    def dispatch(self, hidden: Tensor, expert_indices: Tensor, routing_weights: Tensor) -> DispatchedExperts:
        """Send ``hidden`` [T, H] to the owners of ``expert_indices`` [T, K]; ``routing_weights`` [T, K] keep their gradient.

        HP550: a tensor of another rank, shape, dtype or device, or (on every rank) an index that is no expert's.
        """
        check_hidden(hidden, device=self._device)
        check_choices(hidden, expert_indices, routing_weights)
        ranks = self._axis.size
        order = order_choices(expert_indices, ranks=ranks, experts=self._experts, once=self.once)
        counts = (order.counts_D3, exchange_counts(order.counts_D3, axis=self._axis))
        numbers: list[list[list[int]]] = torch.stack(counts).tolist()  # the one wait for an accelerator
        self._check_outside(numbers[1])
        leaving, coming = (_traffic(host, on_device) for host, on_device in zip(numbers, counts, strict=True))
        journey = Journey(
            sent=sent(order, leaving, shape=tuple(expert_indices.shape)),
            traffic=coming,
            axis=self._axis,
            experts=self._experts // ranks,
        )
        values, weights = dispatch(hidden, routing_weights, journey)
        return DispatchedExperts(
            values=values,
            weights=weights,
            local_ids=journey.there.expert_R,
            counts=journey.there.counts_E,
            receipt=Receipt(self, journey, hidden.shape[1], hidden.dtype),
        )

    def combine(self, values: Tensor, receipt: Any) -> Tensor:
        """Return [T, H] in the dtype of the hidden states: the sum of the rows of ``values``, in at least fp32.

        HP550: ``values`` are not [R, H] as dispatched; HP551: a receipt that is used or of another context.
        """
        check_receipt(receipt, Receipt, context=self)
        rows = receipt.journey.there.order_R.shape[0]
        check_values(values, rows=rows, width=receipt.width, dtype=receipt.dtype, device=self._device)
        receipt.used = True
        return combine(values, receipt.journey, wire=receipt.dtype)

    def _check_outside(self, coming: list[list[int]]) -> None:
        """Every rank has told every other how many of its choices are no expert's, so that all raise together."""
        wrong = {rank: row[2] for rank, row in enumerate(coming) if row[2]}
        if wrong:
            told = ", ".join(f"{count} on ep rank {rank}" for rank, count in wrong.items())
            raise PlanError("HP550", f"expert_indices name no expert: {told}", expected=f"0 to {self._experts - 1}")


def _traffic(host: list[list[int]], counts_D3: Tensor) -> Traffic:
    rows, pairs, _ = zip(*host, strict=True)
    return Traffic(rows=rows, pairs=pairs, rows_D=counts_D3[:, 0], pairs_D=counts_D3[:, 1])


class AllToAll(Transport):
    """A row travels for every choice of an expert: top-k rows per token."""

    name, once = "all_to_all", False


class Dedup(Transport):
    """A row travels for every rank that a token goes to, with its experts and weights there; what goes back is their sum."""

    name, once = "dedup", True
