"""What a transport refuses, word for word; receipts; what it asks of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_core.contracts import DispatchedExperts
from hp_core.errors import HPError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks
from hp_expert_parallel.contexts import AllToAll, Dedup


@pytest.fixture(scope="module")
def mesh() -> Iterator[MeshContext]:
    start_single()
    yield MeshContext.create(Topology())
    dist.destroy_process_group()


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(HPError) as caught:
        action()
    return str(caught.value)


def given(**changes: Tensor) -> dict[str, Tensor]:
    """Return three tokens of four numbers, two choices of four experts each, with some arguments changed."""
    return {
        "hidden": torch.arange(12.0).view(3, 4),
        "expert_indices": torch.tensor([[0, 1], [1, 2], [3, 0]]),
        "routing_weights": torch.full((3, 2), 0.5),
        **changes,
    }


META = "meta"
WHERE = ". expert parallel transport"
REFUSED = [
    ({"hidden": torch.zeros(1, 3, 4)}, f"HP550: hidden has shape (1, 3, 4); expected [T, H]{WHERE}"),
    ({"hidden": torch.zeros(3, 4, dtype=torch.int64)}, f"HP550: hidden is int64; expected a floating dtype{WHERE}"),
    ({"hidden": torch.zeros(3, 4, device=META)}, f"HP550: hidden is on meta; expected cpu{WHERE}"),
    (
        {"expert_indices": torch.zeros(2, 2, dtype=torch.int64)},
        f"HP550: expert_indices has shape (2, 2); expected [3, K], a row for every row of hidden{WHERE}",
    ),
    (
        {"expert_indices": torch.zeros(3, dtype=torch.int64)},
        f"HP550: expert_indices has shape (3,); expected [3, K], a row for every row of hidden{WHERE}",
    ),
    (
        {"expert_indices": torch.zeros(3, 0, dtype=torch.int64)},
        f"HP550: expert_indices has shape (3, 0); expected [3, K], a row for every row of hidden{WHERE}",
    ),
    ({"expert_indices": torch.zeros(3, 2)}, f"HP550: expert_indices is float32; expected int64 or int32{WHERE}"),
    (
        {"expert_indices": torch.zeros(3, 2, dtype=torch.int64, device=META)},
        f"HP550: expert_indices is on meta; expected cpu{WHERE}",
    ),
    (
        {"routing_weights": torch.zeros(3, 1)},
        f"HP550: routing_weights has shape (3, 1); expected (3, 2), that of expert_indices{WHERE}",
    ),
    (
        {"routing_weights": torch.zeros(3, 2, dtype=torch.int64)},
        f"HP550: routing_weights is int64; expected a floating dtype{WHERE}",
    ),
    ({"routing_weights": torch.zeros(3, 2, device=META)}, f"HP550: routing_weights is on meta; expected cpu{WHERE}"),
    (
        {"expert_indices": torch.tensor([[0, 4], [1, -1], [3, 0]])},
        "HP550: expert_indices name no expert: 2 on ep rank 0; expected 0 to 3",
    ),
]


@pytest.mark.parametrize("kind", [AllToAll, Dedup])
@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_dispatched_is_told(changes: dict[str, Tensor], text: str, kind: Any, mesh: MeshContext) -> None:
    context = kind(mesh, {"num_experts": 4})
    assert refusal(lambda: context.dispatch(**given(**changes))) == text


def test_indices_may_be_narrow(mesh: MeshContext) -> None:
    context = Dedup(mesh, {"num_experts": 4})
    there = context.dispatch(**given(expert_indices=given()["expert_indices"].int()))
    assert there.counts.tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("kind", [AllToAll, Dedup])
def test_on_one_rank_rows_are_only_sorted_and_summed(kind: Any, mesh: MeshContext) -> None:
    context = kind(mesh, {"num_experts": 4})
    there = context.dispatch(**given())
    assert isinstance(there, DispatchedExperts)
    assert there.values[:, 0].tolist() == [0.0, 8.0, 0.0, 4.0, 4.0, 8.0]
    assert there.local_ids.tolist() == [0, 0, 1, 1, 2, 3]
    assert there.weights.tolist() == [0.5] * 6
    out = context.combine(there.values * there.weights.unsqueeze(1), there.receipt)
    assert torch.equal(out, given()["hidden"])


class Waiting(TorchDispatchMode):
    """Notes the operators that make the host wait for an accelerator."""

    OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        counted = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in self.OPERATORS or counted or (name == "index" and args[1][0].dtype == torch.bool):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [AllToAll, Dedup])
def test_nothing_waits_for_an_accelerator_but_the_reading_of_sizes(kind: Any, mesh: MeshContext) -> None:
    context = kind(mesh, {"num_experts": 4})
    arguments = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in given().items()}
    original, read = Tensor.tolist, []

    def noted(tensor: Tensor) -> Any:
        read.append(tuple(tensor.shape))
        return original(tensor)

    with Waiting() as waiting, mock.patch.object(Tensor, "tolist", noted):
        there = context.dispatch(**arguments)
        context.combine(there.values * there.weights.unsqueeze(1), there.receipt).sum().backward()
    assert waiting.found == []
    assert read == [(2, 1, 3)]  # what goes and what comes, of one rank: rows, pairs, faults


VALUES = [
    (torch.zeros(6), f"HP550: values has shape (6,); expected (6, 4), the rows that were dispatched{WHERE}"),
    (torch.zeros(5, 4), f"HP550: values has shape (5, 4); expected (6, 4), the rows that were dispatched{WHERE}"),
    (torch.zeros(6, 3), f"HP550: values has shape (6, 3); expected (6, 4), the rows that were dispatched{WHERE}"),
    (torch.zeros(6, 4, dtype=torch.float16), f"HP550: values is float16; expected bfloat16 or float32{WHERE}"),
    (torch.zeros(6, 4, dtype=torch.bfloat16, device=META), f"HP550: values is on meta; expected cpu{WHERE}"),
]


@pytest.mark.parametrize(("values", "text"), VALUES, ids=range(len(VALUES)))
def test_what_cannot_be_combined_is_told_and_the_receipt_stays_good(values: Tensor, text: str, mesh: MeshContext) -> None:
    context = Dedup(mesh, {"num_experts": 4})
    receipt = context.dispatch(**given(hidden=torch.zeros(3, 4, dtype=torch.bfloat16))).receipt
    assert refusal(lambda: context.combine(values, receipt)) == text
    assert context.combine(torch.zeros(6, 4), receipt).dtype == torch.bfloat16


def test_a_receipt_is_for_one_combine_of_the_context_that_gave_it(mesh: MeshContext) -> None:
    context, other = (Dedup(mesh, {"num_experts": 4}) for _ in range(2))
    there = context.dispatch(**given())
    assert refusal(lambda: other.combine(there.values, there.receipt)) == (
        "HP551: receipt belongs to another context; expected one of the context that dispatched"
    )
    assert refusal(lambda: context.combine(there.values, None)) == "HP551: receipt is a NoneType; expected what dispatch gave"
    context.combine(there.values, there.receipt)
    assert refusal(lambda: context.combine(there.values, there.receipt)) == (
        "HP551: receipt is used already; expected one combine for every dispatch"
    )


OPTIONS = [
    ({}, "HP551: protocol ep:dedup gets num_experts = None; expected a positive integer"),
    ({"num_experts": True}, "HP551: protocol ep:dedup gets num_experts = True; expected a positive integer"),
    ({"num_experts": 0}, "HP551: protocol ep:dedup gets num_experts = 0; expected a positive integer"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS, ids=range(len(OPTIONS)))
def test_options_without_experts_are_refused(options: dict[str, Any], text: str, mesh: MeshContext) -> None:
    assert refusal(lambda: Dedup(mesh, options)) == text


@pytest.mark.distributed
def test_two_ranks_raise_the_same_for_what_one_of_them_does() -> None:
    assert run_ranks(2, faults) == [FAULTS, FAULTS]


FAULTS = [
    "HP502: num_experts (3) must be divisible by ep (2)",
    "HP550: expert_indices name no expert: 1 on ep rank 1; expected 0 to 3",
    "HP580: protocol ep:dedup needs an all_to_all of unequal parts, and gloo refuses it: no splits; "
    "expected a backend that can. ep (2)",
    "HP580: protocol ep:all_to_all needs an all_to_all of unequal parts, and gloo gives [7, 7, 7] for [0, 1, 1]; "
    "expected a backend that can. ep (2)",
]


def faults() -> list[str]:
    """Return what is raised for experts that do not divide, for an index of rank 1's, and by backends that cannot."""
    mesh = MeshContext.create(Topology(dp_shard=2, ep=2, shared_memory=False))
    wrong = torch.tensor([[0, 1], [1, 2], [3, 4 if mesh.rank else 0]])
    context = Dedup(mesh, {"num_experts": 4})
    found = [refusal(lambda: Dedup(mesh, {"num_experts": 3})), refusal(lambda: context.dispatch(**given(expert_indices=wrong)))]

    def refuses(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("no splits")

    def moves_nothing(arrived: Tensor, *arguments: Any, **keywords: Any) -> None:
        arrived.fill_(7)

    for kind, behaviour in ((Dedup, refuses), (AllToAll, moves_nothing)):
        with mock.patch.object(dist, "all_to_all_single", behaviour):
            found.append(refusal(lambda kind=kind: kind(mesh, {"num_experts": 4})))  # type: ignore[misc]
    return found


def test_a_receipt_shows_nothing_of_what_it_holds(mesh: MeshContext) -> None:
    receipt = Dedup(mesh, {"num_experts": 4}).dispatch(**given()).receipt
    assert attrs.has(type(receipt))
    assert str(receipt) == "Receipt(width=4, dtype=torch.float32, used=False)"
