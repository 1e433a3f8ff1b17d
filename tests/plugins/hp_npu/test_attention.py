"""Attention on the operator of torch_npu against the plain reference: every kind of mask, all gradients, and what is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from npu_operators import Calls
from torch import Tensor

from hp_components.reference import attention as plain
from hp_core.contracts import AttentionMask
from hp_npu.kernels import attention, masks

DTYPES = [(torch.float32, 2e-5), (torch.bfloat16, 3e-2), (torch.float16, 1e-2)]
S = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [3] * 1 + [4] * 9 + [9] * 2])
POSITIONS = torch.tensor([[0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]])  # a zigzag cut
MASKS = {
    "causal": AttentionMask(),
    "none": AttentionMask(causal=False),
    "window": AttentionMask(window=3),
    "window of one": AttentionMask(window=1),
    "window as long as the row": AttentionMask(window=S),
    "window that looks ahead": AttentionMask(causal=False, window=3),
    "documents": AttentionMask(document_ids=DOCUMENTS),
    "the same documents in all rows": AttentionMask(document_ids=DOCUMENTS[1:]),
    "documents without order": AttentionMask(document_ids=DOCUMENTS, causal=False),
    "documents with a window": AttentionMask(document_ids=DOCUMENTS, window=2),
    "positions": AttentionMask(positions=POSITIONS),
    "positions, window, documents": AttentionMask(positions=POSITIONS, window=4, document_ids=DOCUMENTS.sort(1).values),
    "keys of other documents": AttentionMask(causal=False, document_ids=DOCUMENTS, key_document_ids=DOCUMENTS.flip(0)),
    "all hidden for some": AttentionMask(positions=POSITIONS - 6, key_positions=torch.arange(S).unsqueeze(0)),
}
SHAPES = {  # query heads, key-value heads, widths of keys and values
    "one head each": (2, 2, 8, 8),
    "grouped": (4, 2, 8, 8),
    "one for all, narrow values": (4, 1, 8, 4),
}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(shape: str = "grouped", *, dtype: torch.dtype = torch.float32, queries: int = S) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, width, value_width = SHAPES[shape]
    sizes = ((heads, queries, width), (kv_heads, S, width), (kv_heads, S, value_width))
    one, other, third = (draw(2, *size, dtype=dtype) for size in sizes)
    return one, other, third


def results(function: Callable[..., Any], tensors: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Return outputs (-inf as 0) and the gradients of all inputs, for random gradients of the outputs."""
    outputs = function(*tensors, **options)
    outputs = [o.masked_fill(o == -torch.inf, 0) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
    torch.manual_seed(7)
    total = sum((output * torch.randn(output.shape, dtype=torch.float64).to(output.dtype)).sum() for output in outputs)
    return [*(output.detach() for output in outputs), *torch.autograd.grad(total, tensors)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape, mask, dtype, tolerance, npu: Calls) -> None:
    tensors, options = inputs(shape, dtype=dtype), {"mask": mask, "scale": 0.3}
    assert_same(results(attention.attention, tensors, **options), results(plain.attention, tensors, **options), tolerance)
    assert {name for name, _ in npu} == {"npu_fusion_attention", "npu_fusion_attention_grad"}


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_with_its_log_sum_exp(shape, mask, dtype, tolerance, npu: Calls) -> None:
    tensors, options = inputs(shape, dtype=dtype), {"mask": mask, "scale": 0.3}
    expected = results(plain.attention_with_lse, tensors, **options)
    assert_same(results(attention.attention_with_lse, tensors, **options), expected, tolerance)
    blind = attention.attention_with_lse(*tensors, **options)[1] == -torch.inf
    assert torch.equal(blind, plain.attention_with_lse(*tensors, **options)[1] == -torch.inf)
    assert bool(blind.any()) == any(mask is MASKS[name] for name in ("all hidden for some", "keys of other documents"))


@pytest.mark.parametrize("name", ["positions", "positions, window, documents", "all hidden for some"])
def test_masks_in_blocks_of_queries(name, npu: Calls, monkeypatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 5)
    tensors, options = inputs(), {"mask": MASKS[name], "scale": 0.3}
    found = results(attention.attention_with_lse, tensors, **options)
    assert [tuple(asked["atten_mask"].shape[-2:]) for _, asked in npu[:3]] == [(5, S), (5, S), (2, S)]
    assert_same(found, results(plain.attention_with_lse, tensors, **options), 2e-5)


def test_the_log_sum_exp_alone_has_exact_gradients_in_bfloat16(npu: Calls) -> None:
    """A gradient of 1 + 2^-8 is no bfloat16: what is lost by rounding travels in a feature of its own."""
    query, key, value = inputs(dtype=torch.bfloat16)
    grad = torch.full((2, 4, S), 1 + 2.0**-8)

    def gradient(function: Callable[..., Any], dtype: torch.dtype) -> Tensor:
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in (query, key, value)]
        lse = function(*tensors, mask=AttentionMask(), scale=1.0)[1]
        return torch.autograd.grad(lse, tensors[1], grad.to(lse.dtype))[0]

    exact = gradient(plain.attention_with_lse, torch.float64)
    found = gradient(attention.attention_with_lse, torch.bfloat16)
    assert torch.equal(found, exact.to(torch.bfloat16))


@pytest.mark.parametrize("queries", [5, 19])
@pytest.mark.parametrize("window", [None, 4, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_a_rectangle_begins_at_the_first_query_and_key(causal, window, queries, npu: Calls) -> None:
    tensors = inputs(queries=queries)
    options = {"mask": AttentionMask(causal=causal, window=window), "scale": 0.3}
    expected = results(plain.attention_with_lse, tensors, **options)
    assert_same(results(attention.attention_with_lse, tensors, **options), expected, 2e-5)


CALLED = {
    "causal": {"sparse_mode": 2},
    "none": {"sparse_mode": 0, "atten_mask": None},
    "window": {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0},
    "window of one": {"sparse_mode": 4, "pre_tockens": 0, "next_tockens": 0},
    "window as long as the row": {"sparse_mode": 2},
    "window that looks ahead": {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 2**31 - 1},
    "documents": {"sparse_mode": 3, "input_layout": "TND", "actual_seq_qlen": [5, 12, 13, 22, 24]},
    "documents without order": {"sparse_mode": 0, "atten_mask": None, "actual_seq_kvlen": [5, 12, 13, 22, 24]},
    "documents with a window": {"sparse_mode": 4, "pre_tockens": 1, "next_tockens": 0, "softmax_layout": "TND"},
    "positions": {"sparse_mode": 0, "inner_precise": 2, "input_layout": "BNSD"},
}


@pytest.mark.parametrize("name", CALLED)
def test_what_the_operator_and_its_gradient_are_asked(name, npu: Calls) -> None:
    results(attention.attention, inputs(), mask=MASKS[name], scale=0.3, dropout=0.0)
    defaults = {"atten_mask": None, "sparse_mode": 0, "next_tockens": 2**31 - 1}
    for (operator, asked), scale in zip(npu, ("scale", "scale_value"), strict=True):
        given = {**defaults, **asked}
        assert {key: given[key] for key in CALLED[name]} == CALLED[name], operator
        assert given[scale] == 0.3


def test_dropout_keeps_the_rest_and_is_the_same_in_the_backward(npu: Calls) -> None:
    query, key, value = inputs()
    torch.manual_seed(3)
    out = attention.attention(query, key, value, mask=AttentionMask(causal=False), scale=0.0, dropout=0.25)
    (grad,) = torch.autograd.grad(out.sum(), value)
    assert npu[0][1]["keep_prob"] == npu[1][1]["keep_prob"] == 0.75
    assert npu[1][1]["seed"] > 0
    torch.testing.assert_close((grad * value).sum(), out.sum())  # linear in the values, with the same probabilities


def test_many_documents_are_several_calls(npu: Calls, monkeypatch) -> None:
    monkeypatch.setattr(attention, "DOCUMENTS", 2)
    tensors, options = inputs(), {"mask": MASKS["documents with a window"], "scale": 0.3}
    found = results(attention.attention_with_lse, tensors, **options)
    assert [asked["actual_seq_qlen"] for name, asked in npu if name == "npu_fusion_attention"] == [[5, 12], [1, 10], [2]]
    assert_same(found, results(plain.attention_with_lse, tensors, **options), 2e-5)


@pytest.mark.parametrize("shape", [(2, 0, S), (2, S, 0), (0, S, S)], ids=str)
def test_attention_of_nothing(shape, npu: Calls) -> None:
    batch, queries, keys = shape
    tensors = tuple(draw(batch, 2, length, 8, dtype=torch.float32) for length in (queries, keys, keys))
    out, lse = attention.attention_with_lse(*tensors, mask=AttentionMask(causal=False), scale=1.0)
    assert (out.shape, lse.shape) == ((batch, 2, queries, 8), (batch, 2, queries))
    assert bool((lse == -torch.inf).all())
    assert all(bool((grad == 0).all()) for grad in torch.autograd.grad(out.sum(), tensors))
    assert npu == []


def test_no_mask_is_kept_for_the_backward(npu: Calls) -> None:
    kept: list[Tensor] = []
    tensors = inputs()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        for mask in MASKS.values():
            attention.attention(*tensors, mask=mask, scale=1.0)
    assert all(tensor.dtype != torch.bool or tensor.numel() <= 2 * S for tensor in kept)  # rows without keys: one bit a query


def test_the_compressed_mask_is_made_once_for_a_device() -> None:
    like = torch.zeros(1)
    assert masks.compressed(like) is masks.compressed(like)
    assert masks.compressed(like).sum() == 2048 * 2047 // 2
    assert masks.compressed(torch.nn.Parameter(like)) is not masks.compressed(like)
