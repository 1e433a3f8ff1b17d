"""Every protocol against plain attention over whole rows, outputs and gradients; exact adjoints; what is refused."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from context_cases import Asked, K, N, Way, grouped, key_value, latent, random, run, sequence_dims
from torch import Tensor

from hp_components.reference.attention import attention_with_lse as plain
from hp_core.contracts import AttentionMask
from hp_core.errors import PlanError
from hp_core.testing.ranks import run_ranks

pytestmark = pytest.mark.distributed
LENGTH = 48
WAYS = [
    Way(name="allgather", cp=2),
    Way(name="allgather", cp=2, layout="contiguous"),
    Way(name="allgather", cp=4),
    Way(name="allgather", cp=4, layout="contiguous"),
    Way(name="ulysses", cp=2),
    Way(name="ulysses", cp=4),
    Way(name="ring", cp=2),
    Way(name="ring", cp=2, layout="contiguous"),
    Way(name="ring", cp=4),
    Way(name="ring", cp=4, layout="contiguous"),
    Way(name="hybrid", cp=4, inner=2),
    Way(name="hybrid", cp=4, inner=2, outer="allgather"),
    Way(name="hybrid", cp=4, inner=2, layout="contiguous"),
    Way(name="hybrid", cp=4, inner=4),
    Way(name="hybrid", cp=4, inner=1),
]
ASKED = {
    "causal": Asked(),
    "window 1": Asked(window=1),
    "window 5": Asked(window=5),
    "window 17": Asked(window=17),
    "longer window": Asked(window=100),
    "packed": Asked(starts=((0, 1, 13, 14, 40), (0, 24))),
    "packed alike": Asked(starts=((0, 7, 30),)),
    "packed window": Asked(window=6, starts=((0, 1, 13, 14, 40), (0, 24))),
}


def expected(tensors: list[Tensor], asked: Asked, weights: Tensor) -> list[Tensor]:
    """Return the output of plain attention over whole rows, and the gradient of each tensor."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    kv = key_value(leaves)
    mask = AttentionMask(window=asked.window, document_ids=asked.ids(LENGTH))
    out, _ = plain(leaves[0], *kv.expand(*kv.compact, *kv.weights), mask=mask, scale=0.3)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def differences(way: Way) -> dict[str, float]:
    """Return the largest difference of this rank's output and gradients for every mask, grouped heads and latents."""
    context, rank, found = way.context(), dist.get_rank(), {}
    for name, asked in ASKED.items():
        for kind, tensors in (("grouped", grouped(LENGTH)), ("latent", latent(LENGTH))):
            dims = sequence_dims(tensors)
            weights = random(*tensors[0].shape[:3], 8, seed=9)
            out, *gradients = expected(tensors, asked, weights)
            mine = (_part(way, tensor.clone(), rank, dim) for tensor, dim in zip(tensors, dims, strict=True))
            leaves = [tensor.requires_grad_() for tensor in mine]
            ids = asked.ids(LENGTH)
            local = run(context, leaves, asked, None if ids is None else way.local(ids, rank=rank, dim=1))
            (local * way.local(weights, rank=rank, dim=2)).sum().backward()
            pairs = [(local.detach(), way.local(out, rank=rank, dim=2))]
            for leaf, gradient, dim in zip(leaves, gradients, dims, strict=True):
                pairs.append((_summed(leaf.grad) if dim is None else leaf.grad, _part(way, gradient, rank, dim)))
            found[f"{name}, {kind}"] = max(float((a - b).abs().max()) for a, b in pairs)
    return found


def _summed(gradient: Any) -> Tensor:
    """Return the sum over the ranks, as FSDP makes it of a weight's gradients."""
    dist.all_reduce(gradient)
    return gradient


def _part(way: Way, gradient: Tensor, rank: int, dim: int | None) -> Tensor:
    return gradient if dim is None else way.local(gradient, rank=rank, dim=dim)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_attention_over_cp_equals_attention_over_whole_rows(way: Way) -> None:
    for found in run_ranks(way.cp, differences, way):
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}


def one_head(way: Way) -> float:
    """Return the difference of ulysses with one key-value head, which every rank gets a copy of."""
    context, rank = way.context(), dist.get_rank()
    tensors = grouped(LENGTH, kv_heads=1)
    weights = random(*tensors[0].shape, seed=9)
    out, *gradients = expected(tensors, Asked(), weights)
    leaves = [way.local(tensor, rank=rank, dim=2).requires_grad_() for tensor in tensors]
    local = run(context, leaves, Asked(), None)
    (local * way.local(weights, rank=rank, dim=2)).sum().backward()
    found = [(local.detach(), out), *((leaf.grad, gradient) for leaf, gradient in zip(leaves, gradients, strict=True))]
    return max(float((mine - way.local(whole, rank=rank, dim=2)).abs().max()) for mine, whole in found)  # type: ignore[operator]


@pytest.mark.parametrize("way", [Way(name="ulysses", cp=2), Way(name="hybrid", cp=4, inner=2)], ids=str)
def test_one_key_value_head_serves_all_ranks(way: Way) -> None:
    assert max(run_ranks(way.cp, one_head, way)) < 1e-12


def transport(way: Way) -> None:
    """Check partition, the two exchanges and the gather: round trips, global order, adjoints."""
    context, rank = way.context(), dist.get_rank()
    whole = random(2, N, LENGTH, 8, seed=1)
    mine = way.local(whole, rank=rank, dim=2).requires_grad_()
    partition = context.partition(mine.shape[2])
    assert partition.lengths == (LENGTH // way.cp,) * way.cp
    assert (partition.rank, partition.global_length) == (rank, LENGTH)
    gathered = context.gather_sequence(mine, dim=2)
    assert torch.equal(gathered, whole)
    handle = context.launch_gather_sequence(mine.detach(), dim=2)
    assert torch.equal(handle.wait(), whole)
    with pytest.raises(PlanError, match="HP550: a handle is waited for twice"):
        handle.wait()
    (gathered * (rank + 1)).sum().backward()
    assert torch.equal(mine.grad, torch.full_like(mine, way.cp * (way.cp + 1) / 2))
    heads = context.sequence_to_head(mine.detach(), seq_dim=2, head_dim=1)
    assert heads.shape == (2, N // way.cp, LENGTH, 8)
    assert torch.equal(context.head_to_sequence(heads, seq_dim=2, head_dim=1), mine.detach())


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[5], WAYS[8], WAYS[10]], ids=str)
def test_transport_puts_tokens_in_global_order_and_back(way: Way) -> None:
    run_ranks(way.cp, transport, way)


def refusals(way: Way) -> list[str]:
    """Return what a context says to a mask of positions, a kernel without log-sum-exp, and heads that do not fit."""
    context, rank = way.context(), dist.get_rank()
    query, key, value = (way.local(tensor, rank=rank, dim=2) for tensor in grouped(LENGTH))
    positions = torch.arange(query.shape[2]).unsqueeze(0)
    calls = [
        (query, AttentionMask(positions=positions), None),
        (query, AttentionMask(causal=False), None),
        (query, AttentionMask(), lambda query, key, value, *, mask: query),
        (query[:, :3], AttentionMask(), None),
    ]
    found = []
    for tensor, mask, kernel in calls:
        try:
            context.attention(tensor, key_value([tensor, key, value]), mask=mask, kernel=kernel)
        except PlanError as error:
            found.append(str(error))
    return found


def test_what_a_context_cannot_do_is_an_error() -> None:
    mask = (
        "HP554: a mask that is not causal, or has positions of its own, is passed to attention over cp; expected causal, "
        "window and document_ids; the protocol knows where tokens lie"
    )
    assert run_ranks(2, refusals, Way(name="ulysses", cp=2))[0] == [
        mask,
        mask,
        "HP551: the attention kernel gives no log-sum-exp beside its output; expected one of the operator attention_with_lse, "
        "with its scale bound",
        f"HP550: 3 query heads and {K} key-value heads cannot be shared among 2 ranks; expected heads divisible by cp = 2, or "
        "key-value heads that divide it",
    ]


def test_ways_are_told_apart() -> None:
    assert len({str(attrs.asdict(way)) for way in WAYS}) == len(WAYS)
