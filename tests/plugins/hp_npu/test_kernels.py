"""Every kernel but attention against its plain reference, on torch_npu's schemas: values, gradients, odd shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from npu_operators import Calls
from torch import Tensor

from hp_components.reference import grouped_matmul as plain_grouped_matmul
from hp_components.reference import moe as plain_moe
from hp_components.reference import rms_norm as plain_rms_norm
from hp_components.reference import rotary as plain_rotary
from hp_components.reference import swiglu as plain_swiglu
from hp_npu.kernels import grouped_matmul, moe, rms_norm, rotary, swiglu

DTYPES = [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 1e-2)]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def results(function: Callable[..., Any], inputs: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Return the floating outputs and the gradients of every floating input, for random gradients of the outputs."""
    outputs = function(*inputs, **options)
    floating = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.is_floating_point()]
    torch.manual_seed(7)
    total = sum((output * torch.randn(output.shape, dtype=torch.float64).to(output.dtype)).sum() for output in floating)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return [*(output.detach() for output in floating), *torch.autograd.grad(total, wanted)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if other.numel():
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 4, 16), (0, 8)], ids=str)
def test_rms_norm(shape, dtype, tolerance, offset, npu: Calls) -> None:
    inputs, options = (draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)), {"eps": 1e-5, "offset": offset}
    assert_same(results(rms_norm.rms_norm, inputs, **options), results(plain_rms_norm.rms_norm, inputs, **options), tolerance)
    assert [name for name, _ in npu] == ([] if 0 in shape else ["npu_rms_norm"])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_rms_norm_with_a_weight_of_another_dtype(dtypes, npu: Calls) -> None:
    inputs = (draw(4, 8, dtype=dtypes[0]), draw(8, dtype=dtypes[1]))
    expected = results(plain_rms_norm.rms_norm, inputs, eps=1e-6)
    assert_same(results(rms_norm.rms_norm, inputs, eps=1e-6), expected, 3e-2)


def test_an_offset_is_added_before_it_is_rounded(npu: Calls) -> None:
    """In bfloat16, 1 + 2^-9 is 1: the sum has to be wide."""
    weight = torch.full((8,), 3 * 2.0**-9, dtype=torch.bfloat16)
    found = rms_norm.rms_norm(torch.full((1, 8), 1000.0, dtype=torch.bfloat16), weight, eps=0.0, offset=1.0)
    assert found[0, 0] == 1 + 2.0**-7


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4], ids=["whole head", "half of it"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(batch, rotated, interleaved, dtype, tolerance, npu: Calls) -> None:
    query, key = draw(2, 5, 4, 8, dtype=dtype), draw(2, 5, 2, 8, dtype=dtype)
    angles = torch.randn(batch, 5, rotated, dtype=torch.float64)
    inputs = (query.transpose(1, 2), key.transpose(1, 2), angles.cos().to(dtype), angles.sin().to(dtype))
    found = results(rotary.rotary, inputs, interleaved=interleaved)
    assert_same(found, results(plain_rotary.rotary, inputs, interleaved=interleaved), tolerance)
    assert [name for name, _ in npu] == ["npu_rotary_mul"] * 2


def test_angles_of_another_dtype_are_rounded_and_get_no_gradient(npu: Calls) -> None:
    angles = draw(1, 5, 8)
    query, key = draw(2, 4, 5, 8, dtype=torch.bfloat16), draw(2, 2, 5, 8, dtype=torch.bfloat16)
    found = rotary.rotary(query, key, angles.cos(), angles.sin())
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    assert torch.autograd.grad(found[0].sum(), angles, allow_unused=True) == (None,)


def test_rotary_of_nothing(npu: Calls) -> None:
    inputs = (draw(0, 4, 5, 8), draw(0, 2, 5, 8), torch.zeros(1, 5, 8), torch.zeros(1, 5, 8))
    assert_same(results(rotary.rotary, inputs), results(plain_rotary.rotary, inputs), 0)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (0, 5)], ids=str)
def test_swiglu(shape, dtype, tolerance, npu: Calls) -> None:
    inputs = (draw(*shape, dtype=dtype), draw(*shape, dtype=dtype))
    assert_same(results(swiglu.swiglu, inputs), results(plain_swiglu.swiglu, inputs), tolerance)


GROUPS = {
    "all alike": (3, 5, 7, 9),
    "some empty": (3, 3, 5, 9),
    "the last one empty": (3, 5, 9, 9),
    "rows that belong to nobody": (2, 4, 4, 6),
    "rows that belong to nobody after an empty group": (2, 4, 6, 6),
    "all in one": (0, 9, 9, 9),
    "none": (0, 0, 0, 0),
}


def grouped(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return draw(9, 8, dtype=dtype), draw(4, 8, 16, dtype=dtype), torch.tensor(GROUPS[name], dtype=torch.int32)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_grouped_matmul(name, dtype, tolerance, npu: Calls) -> None:
    inputs = grouped(name, dtype)
    found = results(grouped_matmul.grouped_matmul, inputs)
    assert_same(found, results(plain_grouped_matmul.grouped_matmul, inputs), tolerance)
    assert [(asked["split_item"], asked["group_type"]) for _, asked in npu] == [(3, 0), (3, 0), (2, 2)]


def test_rows_past_the_last_offset_reach_nothing(npu: Calls) -> None:
    x, w, ends = grouped("rows that belong to nobody")
    clean = results(grouped_matmul.grouped_matmul, (x, w, ends))
    with torch.no_grad():
        x[6:] = torch.nan
    poisoned = results(grouped_matmul.grouped_matmul, (x, w, ends))
    assert all(torch.equal(one, other) for one, other in zip(clean, poisoned, strict=True))
    grad = torch.randn(9, 16)
    grad[6:] = torch.nan
    found = torch.autograd.grad(grouped_matmul.grouped_matmul(x, w, ends), (x, w), grad)
    assert all(bool(gradient.isfinite().all()) for gradient in found)


def test_only_the_gradients_that_are_wanted_are_computed(npu: Calls) -> None:
    x, w, ends = grouped("some empty")
    grouped_matmul.grouped_matmul(x, w.detach(), ends).sum().backward()
    grouped_matmul.grouped_matmul(x.detach(), w, ends).sum().backward()
    assert [asked["group_type"] for _, asked in npu] == [0, 0, 0, 2]


def test_no_rows_are_no_call(npu: Calls) -> None:
    inputs = (draw(0, 8), draw(4, 8, 16), torch.zeros(4, dtype=torch.int32))
    assert_same(results(grouped_matmul.grouped_matmul, inputs), results(plain_grouped_matmul.grouped_matmul, inputs), 0)
    assert npu == []


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_moe_permute(tokens, dtype, tolerance, npu: Calls) -> None:
    x, experts = draw(tokens, 4, dtype=dtype), torch.rand(tokens, 5).topk(2).indices  # the last expert gets nothing
    found, expected = (module.moe_permute(x, experts, experts=6) for module in (moe, plain_moe))
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in expected]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    gradients = [results(module.moe_permute, (x, experts), experts=6) for module in (moe, plain_moe)]
    assert_same(*gradients, tolerance)
    assert [name for name, _ in npu] == ["npu_moe_token_permute"] * (2 if tokens else 0)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("weights", [None, "alike", "float32"])
@pytest.mark.parametrize("tokens", [0, 7])
def test_moe_unpermute(tokens, weights, dtype, tolerance, npu: Calls) -> None:
    row = plain_moe.moe_permute(draw(tokens, 4), torch.rand(tokens, 5).topk(2).indices, experts=5)[1]
    weight = () if weights is None else (draw(tokens, 2, dtype=dtype if weights == "alike" else torch.float32),)
    inputs = (draw(2 * tokens, 4, dtype=dtype), row, *weight)
    assert_same(results(moe.moe_unpermute, inputs), results(plain_moe.moe_unpermute, inputs), tolerance)
