"""Experts in C++ against Hugging Face's and torch's: every route, dtypes, odd sizes, rows that lie by expert, and threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_cases import needs_compiler
from expert_cases import ROUTES, E, everything, source, worst
from torch import Tensor

from hp_components import expert_mlp as native
from hp_components.bound import NATIVE
from hp_components.compiled import experts as compiled
from hp_components.compiled.swiglu import swiglu
from hp_components.grouped_experts import OPERATORS, GroupedExperts
from hp_core.errors import PlanError
from hp_core.models.state import update

pytestmark = needs_compiler
IN_C = {**{op: NATIVE[op] for op in OPERATORS}, "swiglu": swiglu}


def draw(*, tokens: int, choices: int, experts: int, hidden: int, inner: int, dtype: torch.dtype) -> list[Tensor]:
    """Return hidden states, both weights, routing weights, a gradient, and each token's experts."""
    torch.manual_seed(0)
    index = torch.randn(tokens, experts).topk(choices).indices
    shapes = ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner), (tokens, choices), (tokens, hidden))
    floats = [torch.randn(shape, dtype=torch.float64).mul(0.3).to(dtype) for shape in shapes]
    return [*floats, index]


def results(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:4]]
    out = function(*inputs[:3], expert_TK=tensors[5], weight_TK=inputs[3])
    return [out, *torch.autograd.grad(out, inputs, tensors[4])]


@pytest.mark.parametrize("routes", ROUTES)
def test_the_component_is_hugging_faces_where_the_plan_says_so(routes, monkeypatch) -> None:
    calls: list[None] = []
    apply = compiled._Experts.apply
    monkeypatch.setattr(compiled._Experts, "apply", lambda *args: calls.append(None) or apply(*args))
    theirs, index = source(), ROUTES[routes]()
    ours = GroupedExperts(module=theirs)
    update(ours, "experts", kernels=IN_C)
    assert worst(everything(ours, ours, index), everything(theirs, theirs, index)) < 1e-12
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("sizes", [(200, 4, 8, 64, 32), (37, 2, 5, 24, 10), (90, 1, 3, 33, 65), (3, 2, 16, 8, 8)], ids=str)
def test_sizes_that_fill_no_tile_are_torchs(sizes, dtype, tolerance) -> None:
    names = ("tokens", "choices", "experts", "hidden", "inner")
    tensors = draw(**dict(zip(names, sizes, strict=True)), dtype=dtype)
    assert worst(results(compiled.expert_mlp, tensors), results(native.expert_mlp, tensors)) <= tolerance


@pytest.mark.parametrize(("dtype", "units", "here"), [
    (torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, True, True)
])  # fmt: skip
def test_matrix_units_take_what_vectors_cannot_keep_up_with(dtype, units, here, monkeypatch) -> None:
    calls: list[None] = []
    apply = compiled._Experts.apply
    monkeypatch.setattr(compiled._Experts, "apply", lambda *args: calls.append(None) or apply(*args))
    monkeypatch.setattr(compiled, "cpu_has_matrix_units", lambda: units)
    tensors = draw(tokens=40, choices=2, experts=3, hidden=16, inner=8, dtype=dtype)
    assert worst(results(compiled.expert_mlp, tensors), results(native.expert_mlp, tensors)) < 2e-2
    assert bool(calls) is here


def test_an_expert_of_many_rows_is_several_tasks() -> None:
    tensors = draw(tokens=2500, choices=2, experts=2, hidden=8, inner=8, dtype=torch.float64)
    assert worst(results(compiled.expert_mlp, tensors), results(native.expert_mlp, tensors)) <= 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("sizes", [(1400, 2, 3, 256, 384), (1400, 2, 3, 250, 390)], ids=["streamed", "not aligned"])
def test_tensors_that_no_cache_holds_are_torchs(sizes, dtype, tolerance) -> None:
    """Rows, what is kept of them and gradients of weights of more than 2 MiB each, which go past the caches."""
    tokens, choices, experts, hidden, inner = sizes
    tensors = draw(tokens=tokens, choices=choices, experts=experts, hidden=hidden, inner=inner, dtype=dtype)
    assert worst(results(compiled.expert_mlp, tensors), results(native.expert_mlp, tensors)) <= tolerance
    counts, rows = torch.tensor([900, 0, 1900]), torch.randn(2800, hidden).to(dtype)
    weight = torch.rand(2800).to(dtype)
    found, expected = (
        function.expert_rows(rows, tensors[1], tensors[2], counts_E=counts, weight_R=weight) for function in (compiled, native)
    )
    assert worst([found], [expected]) <= tolerance


def test_the_number_of_threads_changes_no_bit() -> None:
    tensors = draw(tokens=2000, choices=3, experts=7, hidden=40, inner=24, dtype=torch.float32)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(results(compiled.expert_mlp, tensors))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("counts", [[3, 0, 70, 1], [0, 0, 0, 9], [5, 5, 5, 5]], ids=str)
def test_rows_that_lie_by_expert_are_torchs(counts) -> None:
    """As over ep: rows that came from other ranks, one expert each."""
    rows, hidden, inner = sum(counts), 12, 10
    torch.manual_seed(0)
    shapes = ((rows, hidden), (4, 2 * inner, hidden), (4, hidden, inner), (rows,))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    grad, counts_E = torch.randn(rows, hidden, dtype=torch.float64), torch.tensor(counts)

    def everything_of(function: Any) -> list[Tensor]:
        out = function(*inputs[:3], counts_E=counts_E, weight_R=inputs[3])
        return [out, *torch.autograd.grad(out, inputs, grad)]

    assert worst(everything_of(compiled.expert_rows), everything_of(native.expert_rows)) <= 1e-12


def test_a_gradient_that_is_not_contiguous_and_frozen_weights() -> None:
    tensors = draw(tokens=20, choices=2, experts=4, hidden=16, inner=8, dtype=torch.float64)
    tensors[4] = tensors[4].t().contiguous().t()
    assert worst(results(compiled.expert_mlp, tensors), results(native.expert_mlp, tensors)) <= 1e-12
    x = tensors[0].clone().requires_grad_()
    out = compiled.expert_mlp(x, tensors[1], tensors[2], expert_TK=tensors[5], weight_TK=tensors[3])
    frozen = torch.autograd.grad((out * tensors[4]).sum(), x)
    assert worst(list(frozen), results(native.expert_mlp, tensors)[1:2]) <= 1e-12


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_does_not_exist_is_told(wrong) -> None:
    tensors = draw(tokens=5, choices=2, experts=4, hidden=8, inner=8, dtype=torch.float32)
    tensors[5][3, 1] = wrong
    with pytest.raises(PlanError, match=rf"^HP550: a token's experts are .*{wrong}.*; expected 0 \.\. 3$"):
        results(compiled.expert_mlp, tensors)


def test_shapes_that_do_not_belong_together_are_left_to_torch() -> None:
    x, gate_up, down = torch.zeros(6, 8), torch.zeros(4, 8, 8), torch.zeros(4, 8, 4)
    assert compiled._fits(x, gate_up, down)
    assert not compiled._fits(x[:, :7], gate_up, down)
    assert not compiled._fits(x, gate_up[:3], down)
    with pytest.raises(RuntimeError):
        compiled.expert_rows(x, gate_up, down, counts_E=torch.tensor([1, 2, 3, 4]), weight_R=torch.zeros(6))


@pytest.mark.parametrize("rows", [0, 3])
def test_no_row_and_tensors_on_meta_go_to_torch(rows, monkeypatch) -> None:
    monkeypatch.setattr(compiled._Experts, "apply", None)
    device = "meta" if rows else "cpu"
    x, gate_up, down = (torch.zeros(shape, device=device) for shape in ((rows, 8), (E, 8, 8), (E, 8, 4)))
    index, weights = torch.zeros(rows, 2, dtype=torch.int64, device=device), torch.zeros(rows, 2, device=device)
    if rows == 0:
        assert compiled.expert_mlp(x, gate_up, down, expert_TK=index, weight_TK=weights).shape == (0, 8)
    else:
        assert not compiled._fits(x, gate_up, down)
