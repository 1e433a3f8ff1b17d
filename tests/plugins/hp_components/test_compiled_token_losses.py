"""The head's losses with the C++ softmax against those with torch's: whole and cut vocabularies, any gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_cases import needs_compiler
from kernel_cases import ONE
from test_linear_cross_entropy import LABELS, UPSTREAM, pair
from torch import Tensor

from hp_components import linear_cross_entropy
from hp_components.compiled.cross_entropy import vocab_parallel_cross_entropy
from hp_components.token_losses import Vocabulary, token_losses
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.models.state import update
from hp_core.testing.ranks import run_ranks

pytestmark = needs_compiler
T, V, H = 10, 34, 6
TOKENS = torch.tensor([3, -100, 0, 33, 3, -100, 40, 17, 16, 5])  # 40: nobody's


def whole(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return (torch.randn(T, H, dtype=torch.float64) * 3).to(dtype), torch.randn(V, H, dtype=torch.float64).to(dtype)


def losses_and_gradients(
    hidden: Tensor, weight: Tensor, *, upstream: str, vocabulary: Vocabulary, compiled: bool, chunk: int = 4
) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    losses = token_losses(hidden, weight, TOKENS, vocabulary=vocabulary, chunk=chunk, compiled=compiled)
    factors = torch.ones(()) if upstream == "sum" else torch.linspace(-1, 2, T)
    return [losses.detach(), *torch.autograd.grad(losses, (hidden, weight), factors.to(losses.dtype).expand(T))]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("upstream", ["sum", "factors"])
def test_losses_and_gradients_are_those_of_torchs_softmax(upstream, chunk, dtype, tolerance) -> None:
    given = {"upstream": upstream, "vocabulary": Vocabulary(first=0, total=V, axis=ONE), "chunk": chunk}
    found, expected = (losses_and_gradients(*whole(dtype), compiled=compiled, **given) for compiled in (True, False))
    assert found[0].isnan().nonzero().flatten().tolist() == [6]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def on_two_ranks(upstream: str) -> list[list[Tensor]]:
    axis = MeshContext.create(Topology(tp=2)).axis("tp")
    hidden, weight = whole(torch.float64)
    vocabulary, mine = Vocabulary(first=axis.rank * 17, total=V, axis=axis), weight.chunk(2)[axis.rank]
    return [
        losses_and_gradients(hidden, mine, upstream=upstream, vocabulary=vocabulary, compiled=compiled)
        for compiled in (True, False)
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("upstream", ["sum", "factors"])
def test_a_vocabulary_cut_over_ranks_gives_what_torchs_softmax_gives(upstream) -> None:
    for found, expected in run_ranks(2, on_two_ranks, upstream):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("upstream", UPSTREAM)
def test_the_head_takes_the_compiled_softmax_where_the_plan_names_it(upstream, monkeypatch) -> None:
    taken = []

    def watched(*tensors: Tensor, **options: Any) -> Tensor:
        taken.append(options["compiled"])
        return token_losses(*tensors, **options)

    monkeypatch.setattr(linear_cross_entropy, "token_losses", watched)
    linear, ours, hidden = pair(chunk=3)
    found = []
    for kernels in ({}, {"vocab_parallel_cross_entropy": vocab_parallel_cross_entropy}):
        update(ours, "lm_head", kernels=kernels)
        with ours.bind_labels(LABELS):
            losses = ours(hidden)
        found.append([losses, *torch.autograd.grad(UPSTREAM[upstream](losses), (hidden, linear.weight))])
    assert taken == [False, True]
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_losses_without_gradient_are_the_same() -> None:
    hidden, weight = whole(torch.float64)
    vocabulary = Vocabulary(first=0, total=V, axis=ONE)
    found = token_losses(hidden, weight, TOKENS, vocabulary=vocabulary, chunk=4, compiled=True)
    learnt = token_losses(hidden.requires_grad_(), weight, TOKENS, vocabulary=vocabulary, chunk=4, compiled=True)
    torch.testing.assert_close(found, learnt.detach(), rtol=0, atol=0, equal_nan=True)
