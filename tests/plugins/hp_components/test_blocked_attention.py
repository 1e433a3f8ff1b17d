"""Blocked causal attention against the plain reference: odd lengths, head ratios, widths, dtypes, and where it stands aside."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_cases import CAUSAL, MASKS, SHAPES, assert_same, bfloat16_errors, draw, results
from torch import Tensor

from hp_components.kernel_list import keeps_weights
from hp_components.kernels import attention as fused
from hp_components.kernels import blocked_attention as blocked
from hp_components.reference import attention as plain
from hp_core.contracts import AttentionMask


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_are_the_references(shape, dtype, tolerance) -> None:
    tensors = draw(shape, dtype=dtype)
    assert_same(results(blocked.attention, tensors), results(plain.attention, tensors), tolerance)


@pytest.mark.parametrize("spread", [1.0, 3.0], ids=["flat", "peaked"])
def test_bfloat16_is_as_exact_as_the_fused_kernel(spread) -> None:
    # The fused kernel rounds weights before it normalises them, which keeps each row's largest exact.
    for ours, theirs in zip(*(bfloat16_errors(kernel.attention, spread=spread) for kernel in (blocked, fused)), strict=True):
        assert ours <= 1.3 * theirs


def test_without_a_gradient_the_values_are_the_same_and_nothing_is_kept() -> None:
    tensors = draw((1, 4, 2, 150, 8, 8), dtype=torch.float32)
    with torch.no_grad():
        found = blocked.attention(*tensors[:3], mask=CAUSAL, scale=0.3)
    assert torch.equal(found, results(blocked.attention, tensors)[0])
    assert found.grad_fn is None


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_mask_is_honoured(mask) -> None:
    tensors = draw((1, 4, 2, 20, 8, 8), dtype=torch.float64)
    assert_same(results(blocked.attention, tensors, mask=mask), results(plain.attention, tensors, mask=mask), 1e-12)


def test_a_cache_meets_more_keys_than_queries() -> None:
    tensors = draw((1, 4, 2, 20, 8, 8), dtype=torch.float64)
    tensors[0], tensors[3] = tensors[0][:, :, -3:], tensors[3][:, :, -3:]
    mask = AttentionMask(positions=torch.arange(17, 20).unsqueeze(0), key_positions=torch.arange(20).unsqueeze(0))
    assert_same(results(blocked.attention, tensors, mask=mask), results(plain.attention, tensors, mask=mask), 1e-12)


def count_blocked(monkeypatch, tensors: list[Tensor], **options: Any) -> int:
    """Return how many calls are computed by blocks."""
    calls: list[None] = []
    apply = blocked._Blocked.apply
    monkeypatch.setattr(blocked._Blocked, "apply", lambda *args: calls.append(None) or apply(*args))
    results(blocked.attention, tensors, **options)
    return len(calls)


def test_rows_whose_weights_take_too_much_go_to_the_fused_kernel(monkeypatch) -> None:
    tensors = draw((1, 2, 1, 128, 8, 8), dtype=torch.float32)
    kept = 4 * 2 * (64 * 64 + 64 * 128)
    monkeypatch.setattr(blocked, "KEPT_BYTES", kept)
    assert count_blocked(monkeypatch, tensors) == 1
    monkeypatch.setattr(blocked, "KEPT_BYTES", kept - 1)
    assert count_blocked(monkeypatch, tensors) == 0
    with torch.no_grad():  # nothing is kept there
        assert blocked.attention(*tensors[:3], mask=CAUSAL, scale=0.3).shape == (1, 2, 128, 8)


def test_dropout_goes_to_the_fused_kernel_and_documents_one_by_one(monkeypatch) -> None:
    tensors = draw((2, 2, 1, 10, 8, 8), dtype=torch.float32)
    assert count_blocked(monkeypatch, tensors, dropout=0.5) == 0
    ids = torch.tensor([[0] * 10, [1] * 4 + [2] * 6])
    assert count_blocked(monkeypatch, tensors, mask=AttentionMask(document_ids=ids)) == 3


def test_what_is_kept_is_the_weights_and_the_inputs() -> None:
    """Half of S x S a head and half a block more: 4 bytes x 2 heads x 256 x (256 + 64) / 2."""
    tensors = draw((1, 2, 1, 256, 8, 8), dtype=torch.float32)
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        blocked.attention(*inputs, mask=CAUSAL, scale=0.3)
    assert sum(kept.values()) == 4 * 2 * 256 * (256 + 64) // 2 + sum(4 * math.prod(tensor.shape) for tensor in inputs)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch._dynamo does it itself
def test_it_compiles() -> None:
    tensors = draw((1, 4, 2, 70, 8, 8), dtype=torch.float64)
    compiled = torch.compile(blocked.attention, backend="aot_eager")
    assert_same(results(compiled, tensors), results(blocked.attention, tensors), 1e-12)


def test_shapes_are_known_on_meta() -> None:
    tensors = [tensor.to("meta") for tensor in draw((1, 4, 2, 70, 8, 6), dtype=torch.float32)]
    found = results(blocked.attention, tensors)
    assert [tuple(tensor.shape) for tensor in found] == [(1, 4, 70, 6), (1, 4, 70, 8), (1, 2, 70, 8), (1, 2, 70, 6)]


def test_auto_leaves_rows_that_are_too_long_to_the_fused_kernel() -> None:
    assert [keeps_weights({"sequence": sequence}) for sequence in (1, 4096, 4097)] == [True, True, False]
