"""The lookup by torch and in C++ against the plain reference: whole and cut rows, ids of others and of nobody, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_cases import needs_compiler
from kernel_cases import DTYPES, EXACT, Function, assert_same, draw, results
from torch import Tensor, nn

from hp_components.compiled import embedding as compiled
from hp_components.kernels import embedding as native
from hp_components.reference import embedding as plain

FAST = [pytest.param(native.embedding, id="torch"), pytest.param(compiled.embedding, id="compiled", marks=needs_compiler)]
ALL = [*FAST, pytest.param(plain.embedding, id="reference")]
IDS = torch.tensor([[3, 0, 3, 7], [1, 3, 2, 0], [5, 5, 3, 4]])
PLACES = {  # the rows of a rank, and what it is told about them
    "whole": (8, {"first": 0, "total": 8, "padding": None}),
    "whole, padding": (8, {"first": 0, "total": 8, "padding": 3}),
    "first half": (4, {"first": 0, "total": 8, "padding": None}),
    "first half, padding": (4, {"first": 0, "total": 8, "padding": 3}),
    "second half": (4, {"first": 4, "total": 8, "padding": None}),
    "second half, padding elsewhere": (4, {"first": 4, "total": 8, "padding": 3}),
    "no id has any": (3, {"first": 9, "total": 12, "padding": None}),
}


@pytest.mark.parametrize("width", [1, 7, 33, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kernel", FAST)
def test_rows_and_gradient(kernel, place, dtype, tolerance, width) -> None:
    rows, options = PLACES[place]
    weight = draw(rows, width, dtype=dtype)
    found, expected = (results(function, (IDS, weight), **options) for function in (kernel, plain.embedding))
    assert torch.equal(found[0], expected[0])
    assert_same(found, expected, tolerance)


@pytest.mark.parametrize("ids", [IDS.int(), IDS.t(), IDS[0, 0], IDS[:0], IDS[:, :0].int()], ids=lambda ids: f"{ids.dtype}")
@pytest.mark.parametrize("place", ["whole, padding", "first half, padding"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernel", FAST)
def test_ids_of_any_shape_and_width(kernel, dtype, place, ids) -> None:
    rows, options = PLACES[place]
    weight = draw(rows, 5, dtype=dtype)
    found, expected = (results(function, (ids, weight), **options) for function in (kernel, plain.embedding))
    assert found[0].shape == (*ids.shape, 5)
    assert_same(found, expected, EXACT if dtype == torch.float64 else 3e-2)


@pytest.mark.parametrize("kernel", ALL)
def test_the_parts_of_all_ranks_add_up_to_torchs(kernel) -> None:
    weight = draw(8, 4)
    shards = [half.detach().clone().requires_grad_() for half in weight.chunk(2)]
    parts = [kernel(IDS, shard, first=4 * rank, total=8, padding=3) for rank, shard in enumerate(shards)]
    assert torch.equal(parts[1] != 0, (IDS >= 4).unsqueeze(-1).expand(3, 4, 4))
    whole = nn.functional.embedding(IDS, weight, padding_idx=3)
    assert torch.equal(parts[0] + parts[1], whole)
    grad = torch.randn_like(whole)
    found = torch.cat([torch.autograd.grad(part, shard, grad)[0] for part, shard in zip(parts, shards, strict=True)])
    assert_same([found], torch.autograd.grad(whole, weight, grad), EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unknown", [-1, 8, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("kernel", ALL)
def test_an_id_of_nobody_cannot_pass_unseen_and_reaches_no_row(kernel, unknown, dtype) -> None:
    weight = draw(4, 2, dtype=dtype)
    for ids in (torch.tensor([1, unknown]), torch.tensor([1, unknown], dtype=torch.int32)):
        output = kernel(ids, weight, first=0, total=8, padding=None)
        assert output.isnan().tolist() == [[False, False], [True, True]]
        (grad,) = torch.autograd.grad(output, weight, torch.ones_like(output))
        assert grad.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]
        with pytest.raises(IndexError, match="index out of range"):
            kernel(ids, weight.repeat(2, 1), first=0, total=8, padding=None)


@pytest.mark.parametrize("kernel", ALL)
def test_the_gradient_of_a_frequent_id_is_summed_in_fp32(kernel) -> None:
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    output = kernel(torch.zeros(1024, dtype=torch.int64), weight, first=0, total=2, padding=None)
    (grad,) = torch.autograd.grad(output, weight, torch.ones_like(output))
    assert grad.flatten().tolist() == [1024.0, 0.0]  # a running bf16 sum of ones stops at 256


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("seen", [lambda x: x[::2, 1:6], lambda x: x[:5, :5].t(), lambda x: x[0, :5].expand(5, 5)])
def test_weight_and_gradient_may_lie_anywhere(kernel, seen) -> None:
    ids, place = torch.tensor([4, 0, 1, 4, 7]), {"first": 1, "total": 8, "padding": None}
    inputs, grad = draw(10, 9), draw(10, 9).detach()

    def gradients(function: Function) -> list[Tensor]:
        output = function(ids, seen(inputs), **place)
        return [output.detach(), *torch.autograd.grad(output, inputs, seen(grad))]

    assert_same(gradients(kernel), gradients(plain.embedding), EXACT)


@needs_compiler
@pytest.mark.parametrize("ids", ["many", "one", "rare and frequent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype, ids) -> None:
    numbers = {"many": torch.rand(3000), "one": torch.zeros(3000), "rare and frequent": torch.rand(3000) ** 6}[ids]
    inputs = ((numbers * 600).long(), draw(500, 70, dtype=dtype))
    place: dict[str, Any] = {"first": 0, "total": 600, "padding": 2}
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        found.append(results(compiled.embedding, inputs, **place))
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for run in found[1:] for one, other in zip(found[0], run, strict=True))
    assert_same(found[0], results(plain.embedding, inputs, **place), 1e-5 if dtype == torch.float32 else 3e-2)


def test_what_the_library_does_not_take_goes_to_torchs_kernel() -> None:
    place: dict[str, Any] = {"first": 0, "total": 8, "padding": None}
    half = draw(4, 3, dtype=torch.float16)
    assert_same(results(compiled.embedding, (IDS, half), **place), results(native.embedding, (IDS, half), **place), 0)
    assert compiled.embedding(IDS.to("meta"), half.to("meta"), **place).shape == (3, 4, 3)
    assert compiled.embedding(IDS, draw(4, 0), **place).shape == (3, 4, 0)
    with pytest.raises(RuntimeError):
        compiled.embedding(IDS.short(), draw(8, 3), **place)
    with pytest.raises(RuntimeError):
        compiled.embedding(IDS, draw(8), **place)
