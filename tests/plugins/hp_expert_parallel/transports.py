"""What one rank does with a transport, and the same in one process without any: linear experts, a random linear loss."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from hp_core.contracts.protocol import EPContext
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_expert_parallel.contexts import AllToAll, Dedup

KINDS = {"all_to_all": AllToAll, "dedup": Dedup}


@attrs.frozen(kw_only=True)
class Case:
    """Sizes and how the tokens choose: ``tokens`` of each rank, experts, top-k, hidden size.

    ``poisoned``: uninitialised memory is filled with NaN.
    """

    kind: str
    tokens: tuple[int, ...] = (5, 3)
    experts: int = 8
    top_k: int = 3
    hidden: int = 6
    routing: str = "random"
    dtype: torch.dtype = torch.float64
    weight_dtype: torch.dtype = torch.float64
    poisoned: bool = False


@attrs.frozen(kw_only=True)
class Data:
    """Tokens, choices, weights and the loss's coefficients of all ranks, and the experts' matrices."""

    hidden_TH: Tensor
    expert_TK: Tensor
    weight_TK: Tensor
    loss_TH: Tensor
    matrix_EHH: Tensor


def data(case: Case) -> Data:
    """Return the same random numbers on every rank."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tokens = sum(case.tokens)
    scores = torch.rand(tokens, case.experts, generator=generator)
    if case.routing == "one":
        expert_TK = torch.full((tokens, case.top_k), case.experts - 1)
    else:
        known = case.experts // 2 if case.routing == "half" else case.experts
        expert_TK = scores[:, :known].topk(case.top_k).indices
    weight_TK = normal(tokens, case.top_k, dtype=case.weight_dtype)
    weight_TK[::2, 0] = 0.0  # a choice of probability zero travels too, and has a gradient
    return Data(
        hidden_TH=normal(tokens, case.hidden),
        expert_TK=expert_TK,
        weight_TK=weight_TK,
        loss_TH=normal(tokens, case.hidden),
        matrix_EHH=normal(case.experts, case.hidden, case.hidden),
    )


def dense(case: Case) -> dict[str, Tensor]:
    """Return the output and the gradients of one process that has all tokens and all experts, in fp64 from the same numbers."""
    found = data(case)
    leaves = (t.double().requires_grad_() for t in (found.hidden_TH, found.weight_TK, found.matrix_EHH))
    hidden, weight, matrix = leaves
    rows_TKH = torch.einsum("th,tkhg->tkg", hidden, matrix[found.expert_TK])
    out = (rows_TKH * weight.unsqueeze(2)).sum(1)
    (out * found.loss_TH.double()).sum().backward()
    grads = {"hidden": hidden.grad, "weight": weight.grad, "matrix": matrix.grad}
    return {"out": out.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def context(case: Case, mesh: MeshContext) -> EPContext:
    """Return the case's transport."""
    return KINDS[case.kind](mesh, {"num_experts": case.experts})


def mesh_of(case: Case) -> MeshContext:
    """Return a mesh of one ep group."""
    return MeshContext.create(Topology(dp_shard=len(case.tokens), ep=len(case.tokens)))


def each_on_ranks(cases: list[Case]) -> list[dict[str, Tensor]]:
    """Return what :func:`on_ranks` returns for each case."""
    return [on_ranks(case) for case in cases]


def on_ranks(case: Case) -> dict[str, Tensor]:
    """Return this rank's part of what :func:`dense` returns."""
    torch.use_deterministic_algorithms(case.poisoned)  # fills what is allocated and not written
    mesh, found = mesh_of(case), data(case)
    rank, first = mesh.axis("ep").rank, sum(case.tokens[: mesh.axis("ep").rank])
    mine, local = slice(first, first + case.tokens[rank]), case.experts // len(case.tokens)
    hidden, weight = (t[mine].clone().requires_grad_() for t in (found.hidden_TH, found.weight_TK))
    matrix = found.matrix_EHH[rank * local :][:local].clone().requires_grad_()
    ep = context(case, mesh)
    there = ep.dispatch(hidden, found.expert_TK[mine], weight)
    check_dispatched(there, local)
    y_RH = torch.einsum("rh,rhg->rg", there.values, matrix[there.local_ids]) * there.weights.unsqueeze(1).to(case.dtype)
    out = ep.combine(y_RH, there.receipt)
    (out * found.loss_TH[mine]).sum().backward()
    grads = {"hidden": hidden.grad, "weight": weight.grad, "matrix": matrix.grad}
    return {"out": out.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def check_dispatched(there: Any, local: int) -> None:
    """The rows lie by expert, and the counts say where."""
    assert there.local_ids.tolist() == torch.arange(local).repeat_interleave(there.counts).tolist()
    assert there.values.shape[0] == there.weights.shape[0] == int(there.counts.sum())
