"""Members of grouped_experts and their operators against Hugging Face: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_cases import INNER, ROUTES, E, H, everything, source, worst
from torch import Tensor, nn
from transformers.integrations.moe import batched_mm_experts_forward

from hp_components import expert_mlp
from hp_components.bound import NATIVE
from hp_components.expert_products import batched_product, loop_product
from hp_components.grouped_experts import OPERATORS, BatchedExperts, GroupedExperts, LoopExperts
from hp_components.kernel_list import kernels
from hp_components.reference.grouped_matmul import grouped_matmul
from hp_core.models.state import update
from hp_core.plugins.lazy import load

MEMBERS = [GroupedExperts, LoopExperts, BatchedExperts]
REFERENCE = {kernel.op: load(kernel.implementation) for kernel in kernels() if kernel.name == "reference"}


def with_biases() -> nn.Module:
    """Return Hugging Face's experts with random biases; their forward is Hugging Face's batched one."""
    theirs = source()
    theirs.has_bias = True
    theirs.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * INNER, dtype=torch.float64))
    theirs.down_proj_bias = nn.Parameter(torch.randn(E, H, dtype=torch.float64))
    return theirs


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("routes", ROUTES)
def test_every_member_is_hugging_faces(member: type[GroupedExperts], routes: str) -> None:
    torch.manual_seed(2)
    theirs, index = source(), ROUTES[routes]()
    ours = member(module=theirs)
    assert worst(everything(ours, ours, index), everything(theirs, theirs, index)) < 1e-12


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("routes", ["some experts have none", "one token"])
def test_a_bias_of_every_expert_is_hugging_faces(member: type[GroupedExperts], routes: str) -> None:
    theirs, index = with_biases(), ROUTES[routes]()
    ours = member(module=theirs)
    assert ours.down_proj_bias is theirs.down_proj_bias
    assert ours.gate_up_proj_bias is not None
    assert ours.gate_up_proj_bias.shape == (E, 2, INNER)

    def hugging_faces(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return batched_mm_experts_forward(theirs, hidden, index, weights)

    found = named(everything(ours, ours, index), ours)
    expected = named(everything(hugging_faces, theirs, index), theirs)
    assert found.keys() == expected.keys()
    assert worst([found[name] for name in expected], list(expected.values())) < 1e-12


def named(results: list[Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return an output and gradients by name; parameters come in another order in another class."""
    names = ("output", "hidden", "routing", *(name for name, _ in module.named_parameters()))
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("op", OPERATORS)
def test_the_chosen_kernel_computes_its_operator(op: str) -> None:
    calls = []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(op)
        return REFERENCE[op](*arguments, **options)

    index = ROUTES["every expert has tokens"]()
    ours = GroupedExperts(module=source())
    expected = everything(ours, ours, index)
    update(ours, "experts", kernels={op: counted})
    assert worst(everything(ours, ours, index), expected) < 1e-12
    assert len(calls) == (2 if op == "grouped_matmul" else 1)


def test_torchs_own_kernels_are_one_fused_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = expert_mlp.expert_mlp
    monkeypatch.setattr(expert_mlp, "expert_mlp", lambda *a, **k: calls.append(a) or fused(*a, **k))
    ours = GroupedExperts(module=source())
    everything(ours, ours, ROUTES["one token"]())
    update(ours, "experts", kernels={op: NATIVE[op] for op in OPERATORS})
    everything(ours, ours, ROUTES["one token"]())
    assert len(calls) == 2


@pytest.mark.parametrize("product", [loop_product, batched_product])
@pytest.mark.parametrize("ends", [[3, 3, 10], [0, 10, 10], [10, 10, 10], [4, 7, 10]], ids=str)
def test_products_are_the_operators(product: Callable[..., Tensor], ends: list[int]) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((10, 4), (3, 4, 5)))
    offsets, grad = torch.tensor(ends, dtype=torch.int32), torch.randn(10, 5, dtype=torch.float64)
    out, expected = product(x, w, offsets), grouped_matmul(x, w, offsets)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    pairs = zip(torch.autograd.grad(out, (x, w), grad), torch.autograd.grad(expected, (x, w), grad), strict=True)
    assert all(torch.allclose(one, other, rtol=0, atol=1e-12) for one, other in pairs)
