"""What travels, counted where it leaves: a token's row once per rank, its numbers beside it, counts once; both ways."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_core.mesh.shared_memory import SharedMemory
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks
from hp_expert_parallel import traffic

sys.path.insert(0, str(Path(__file__).parent))  # what the ranks do is a module beside the tests
from transports import Case, data, on_ranks

pytestmark = pytest.mark.distributed
RANKS, TOKENS, EXPERTS, TOP_K, HIDDEN = 4, 512, 32, 4, 64
STAGES = ("counts", "dispatch", "combine", "combine's gradient", "dispatch's gradient")


@attrs.frozen
class Sending:
    """One collective as a rank starts it: the bytes of all that it sends, and the dtype."""

    size: int
    dtype: str


def expected_ranks(*, ranks: int, experts: int, top_k: int) -> float:
    """Return how many ranks hold an expert of a token that chooses evenly, without repeating itself."""
    return ranks * (1 - math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k))


def watched(cases: list[Case]) -> list[list[Sending]]:
    """Return what this rank sends in each case, in order, the exchange that asks the backend left out."""
    original, found = dist.all_to_all_single, []
    for case in cases:
        sent: list[Sending] = []

        def watch(output: Tensor, tensor: Tensor, *arguments: Any, sent: list[Sending] = sent, **keywords: Any) -> Any:
            sent.append(Sending(tensor.numel() * tensor.element_size(), str(tensor.dtype)))
            return original(output, tensor, *arguments, **keywords)

        sockets = mock.patch.object(SharedMemory, "open", return_value=None)  # what goes through them can be watched
        with sockets, mock.patch.object(dist, "all_to_all_single", watch):
            on_ranks(case)
        found.append(sent[1:])
    return found


def case(kind: str, routing: str, dtype: torch.dtype) -> Case:
    return Case(
        kind=kind,
        tokens=(TOKENS,) * RANKS,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        routing=routing,
        dtype=dtype,
        weight_dtype=torch.float32,
    )


CASES = {
    f"{kind}, {routing}, {str(dtype)[6:]}": case(kind, routing, dtype)
    for kind in ("dedup", "all_to_all")
    for routing in ("random", "half", "one")
    for dtype in (torch.float32, torch.bfloat16)
}


@pytest.fixture(scope="module")
def sendings() -> list[dict[str, list[Sending]]]:
    """What each rank sends in each case."""
    found = run_ranks(RANKS, watched, list(CASES.values()), timeout=240)
    return [dict(zip(CASES, of_rank, strict=True)) for of_rank in found]


def rows(case: Case, rank: int) -> int:
    """Return how many rows the protocol has to send for the choices of one rank, itself included."""
    chosen = data(case).expert_TK[rank * TOKENS :][:TOKENS] // (EXPERTS // RANKS)
    return chosen.numel() if case.kind == "all_to_all" else sum(len(set(token)) for token in chosen.tolist())


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_what_it_must_and_two_percent_more_at_most(name: str, sendings: list[dict[str, list[Sending]]]) -> None:
    case, row = CASES[name], CASES[name].dtype.itemsize * HIDDEN
    pairs = RANKS * TOKENS * TOP_K
    for rank in range(RANKS):
        assert len(sendings[rank][name]) == len(STAGES)
    least = sum(rows(case, rank) for rank in range(RANKS)) * row
    total = {
        stage: sum(sent.size for sent in stages)
        for stage, *stages in zip(STAGES, *(found[name] for found in sendings), strict=True)
    }
    assert total["counts"] == RANKS * RANKS * 3 * 8  # rows, pairs and faults, from each to each, once
    assert total["combine"] == total["combine's gradient"] == least
    assert least + 8 * pairs <= total["dispatch"] <= 1.02 * (least + 8 * pairs)  # an expert and a weight for every pair
    assert least + 4 * pairs <= total["dispatch's gradient"] <= 1.02 * (least + 4 * pairs)  # a weight's gradient


@pytest.mark.parametrize("name", CASES)
def test_counts_are_exchanged_once_and_all_else_has_the_hidden_states_dtype(
    name: str, sendings: list[dict[str, list[Sending]]]
) -> None:
    dtypes = [sent.dtype for sent in sendings[0][name]]
    assert dtypes == ["torch.int64", *[str(CASES[name].dtype)] * 4]


@pytest.mark.parametrize("kind", ["dedup", "all_to_all"])
def test_what_a_plan_says_is_what_even_choices_send(kind: str, sendings: list[dict[str, list[Sending]]]) -> None:
    name, row = f"{kind}, random, float32", torch.float32.itemsize
    config = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "hidden_size": HIDDEN}
    told = getattr(traffic, kind)({}, config, Topology(dp_shard=RANKS, ep=RANKS), (1, TOKENS))
    stages = [sum(found[name][place].size for found in sendings) / RANKS for place in range(len(STAGES))]
    away = (RANKS - 1) / RANKS  # the plan leaves out what a rank keeps
    assert told.forward * row + told.forward_bytes == pytest.approx(sum(stages[:3]) * away, rel=0.03)
    assert told.backward * row + told.backward_bytes == pytest.approx(sum(stages[3:]) * away, rel=0.03)
    assert told.assumed == traffic.EVEN


def test_rows_per_token_are_what_the_formula_says() -> None:
    even = CASES["dedup, random, float32"]
    found = sum(rows(even, rank) for rank in range(RANKS)) / (RANKS * TOKENS)
    assert found == pytest.approx(expected_ranks(ranks=RANKS, experts=EXPERTS, top_k=TOP_K), rel=0.02)
    assert expected_ranks(ranks=8, experts=128, top_k=8) == pytest.approx(5.34, abs=5e-3)
    assert expected_ranks(ranks=4, experts=128, top_k=8) == pytest.approx(3.63, abs=5e-3)
