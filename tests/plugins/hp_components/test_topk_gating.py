"""Gating by torch and in C++ against its plain reference: choices, weights, gradients, groups, ties, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_cases import needs_compiler
from kernel_cases import DTYPES, assert_same, draw, results
from torch import Tensor

from hp_components.compiled import topk_gating as compiled
from hp_components.kernels import topk_gating as native
from hp_components.reference import topk_gating as plain
from hp_core.testing.routing import ForceRouting, narrow_routing

KERNELS = [pytest.param(native, id="torch"), pytest.param(compiled, id="compiled", marks=needs_compiler)]
SIZES = [(9, 16, 4), (33, 7, 1), (5, 256, 8), (3, 1, 1), (4, 6, 6), (0, 8, 2)]
WAYS = [
    {},
    {"normalize": False},
    {"scoring": "sigmoid", "scale": 2.5},
    {"scoring": "sigmoid", "normalize": False, "scale": 0.5},
]


def by_expert(kernel: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the operator with a token's choices in order of the experts: they may come in any."""

    def ordered(*inputs: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        weight, index = kernel.topk_gating(*inputs, **options)
        order = index.argsort(dim=-1)
        return weight.gather(1, order), index.gather(1, order)

    return ordered


def checked(kernel: Any, inputs: tuple[Tensor | None, ...], tolerance: float, **options: Any) -> None:
    """Same experts, weights and gradients within ``tolerance``."""
    logits, bias = inputs
    found, expected = (by_expert(one)(logits, bias, **options)[1] for one in (kernel, plain))
    assert torch.equal(found, expected)
    assert found.dtype == torch.int64
    given = (logits,) if bias is None else (logits, bias)
    assert_same(results(by_expert(kernel), given, **options), results(by_expert(plain), given, **options), tolerance)


def distinct(tokens: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Return logits of which no two of a token are near each other, so that rounding decides no choice."""
    places = torch.rand(tokens, experts).argsort(-1)
    return (places.double() / 8 - experts / 16).to(dtype).requires_grad_()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_topk_gating(kernel, tokens, experts, top_k, way, dtype, tolerance) -> None:
    if dtype != torch.float64 and experts > 16 and way.get("scoring") == "sigmoid":
        pytest.skip("sigmoids of 256 distinct logits round to equal ones")
    checked(kernel, (distinct(tokens, experts, dtype), None), tolerance, top_k=top_k, **way)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES[:2])
@pytest.mark.parametrize(("experts", "groups", "kept", "top_k"), [(16, 4, 2, 4), (64, 8, 4, 6), (6, 3, 1, 2), (8, 1, 1, 3)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_and_groups_choose_and_scores_weigh(kernel, experts, groups, kept, top_k, dtype, tolerance) -> None:
    inputs = (draw(40, experts, dtype=dtype), torch.randn(experts).to(dtype))
    options = {"top_k": top_k, "scoring": "sigmoid", "groups": groups, "kept_groups": kept, "scale": 2.5}
    checked(kernel, inputs, tolerance, **options)
    index = kernel.topk_gating(*inputs, **options)[1]
    assert all(len(set((row // (experts // groups)).tolist())) <= kept for row in index)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_of_another_dtype_and_logits_that_lie_apart(kernel) -> None:
    wide = draw(12, 40)
    checked(kernel, (wide[:, 3:11], torch.randn(8)), 1e-12, top_k=3, scoring="sigmoid")
    checked(kernel, (draw(8, 12).t(), None), 1e-12, top_k=3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("number", [0.0, float("nan"), float("-inf")])
def test_experts_exist_whatever_the_scores_are(kernel, number) -> None:
    """Equal ones, and those that are no numbers, whose weights say so."""
    logits = torch.full((3, 8), number)
    weight, index = kernel.topk_gating(logits, top_k=4)
    assert all(sorted(set(row)) == sorted(row) for row in index.tolist())
    assert 0 <= int(index.min()) <= int(index.max()) < 8
    assert weight.isnan().all() if number else torch.equal(weight, torch.full((3, 4), 0.25))


@needs_compiler
def test_of_equal_scores_the_first_is_taken() -> None:
    assert compiled.topk_gating(torch.tensor([[0.0, 1, 0, 1, 0]]), top_k=4)[1].tolist() == [[1, 3, 0, 2]]


@needs_compiler
def test_choices_can_be_forced() -> None:
    """As cells in low precision do."""
    with ForceRouting([torch.tensor([[2, 0]])]):
        assert compiled.topk_gating(torch.tensor([[3.0, 2, 1]]), top_k=2)[1].tolist() == [[2, 0]]


@needs_compiler
def test_choices_can_be_narrowed() -> None:
    """As cells do whose last experts get no tokens."""
    with narrow_routing(2):
        assert compiled.topk_gating(torch.tensor([[1.0, 2, 3]]), top_k=1)[1].tolist() == [[1]]
    assert compiled.topk_gating(torch.tensor([[1.0, 2, 3]]), top_k=1)[1].tolist() == [[2]]


@needs_compiler
def test_threads_change_no_bit() -> None:
    logits = draw(4096, 16, dtype=torch.float32)
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found.append(results(compiled.topk_gating, (logits,), top_k=4))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_does_not_belong_together_is_torchs_to_refuse(kernel) -> None:
    with pytest.raises(RuntimeError):
        kernel.topk_gating(torch.zeros(3, 8), top_k=9)
    with pytest.raises(RuntimeError):
        kernel.topk_gating(torch.zeros(3, 8), torch.zeros(7), top_k=2)
    with pytest.raises(RuntimeError):
        kernel.topk_gating(torch.zeros(3, 8), top_k=2, groups=3, kept_groups=1)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_torchs_kernel_compiles(way) -> None:
    logits = draw(9, 16, dtype=torch.float32)
    run = torch.compile(native.topk_gating, backend="aot_eager", fullgraph=True)
    assert_same(results(run, (logits,), top_k=4, **way), results(native.topk_gating, (logits,), top_k=4, **way), 1e-6)
