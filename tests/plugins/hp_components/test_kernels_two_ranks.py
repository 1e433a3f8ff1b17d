"""The vocabulary-parallel cross-entropy on two ranks against a plain one of whole logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hp_components.compiled import cross_entropy as compiled
from hp_components.compiled.compiler import compiler
from hp_components.kernels import cross_entropy
from hp_components.reference import cross_entropy as plain
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks

LABELS = torch.tensor([3, -100, 0, 7, 4])
KINDS = {"torch": cross_entropy, "reference": plain} | ({"compiled": compiled} if compiler() else {})


def whole() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 8, dtype=torch.float64), torch.randn(5, dtype=torch.float64)


def on_two_ranks(kind: str) -> tuple[Tensor, Tensor]:
    logits, factors = whole()
    axis = MeshContext.create(Topology(tp=2)).axis("tp")
    mine = logits.chunk(2, dim=1)[axis.rank].clone().requires_grad_()
    losses = KINDS[kind].vocab_parallel_cross_entropy(mine, LABELS, first=axis.rank * 4, axis=axis)
    return losses.detach(), torch.autograd.grad((losses * factors).sum(), mine)[0]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_two_ranks_give_the_loss_and_gradient_of_whole_logits(kind) -> None:
    logits, factors = whole()
    logits.requires_grad_()
    losses = functional.cross_entropy(logits, LABELS, reduction="none")
    (gradient,) = torch.autograd.grad((losses * factors).sum(), logits)
    results = run_ranks(2, on_two_ranks, kind)
    for found, _ in results:
        torch.testing.assert_close(found, losses.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([part for _, part in results], 1), gradient, rtol=0, atol=1e-12)
