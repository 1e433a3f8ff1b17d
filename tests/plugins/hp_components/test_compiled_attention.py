"""Attention in C++ against the plain reference: shapes, masks, dtypes, its log-sum-exp, and what it leaves to torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import attrs
import pytest
import torch
from attention_cases import CAUSAL, MASKS, SHAPES, assert_same, bfloat16_errors, draw, results
from compiled_cases import needs_compiler
from torch import Tensor

from hp_components.compiled import attention as compiled
from hp_components.kernels import attention as fused
from hp_components.reference import attention as plain
from hp_core.contracts import AttentionMask

pytestmark = needs_compiler


@pytest.fixture
def counted(monkeypatch) -> list[None]:
    """A list that grows by one with every call that is computed in C++."""
    calls: list[None] = []
    apply = compiled._Attention.apply
    monkeypatch.setattr(compiled._Attention, "apply", lambda *args: calls.append(None) or apply(*args))
    return calls


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (2, 2, 1, 37, 33, 65)], ids=[*SHAPES, "odd widths"])
def test_values_and_gradients_are_the_references(shape, dtype, tolerance, counted) -> None:
    tensors = draw(shape, dtype=dtype)
    assert_same(results(compiled.attention, tensors), results(plain.attention, tensors), tolerance)
    assert len(counted) == 1


@pytest.mark.parametrize("spread", [1.0, 3.0], ids=["flat", "peaked"])
def test_bfloat16_is_as_exact_as_the_fused_kernel(spread) -> None:
    for ours, theirs in zip(*(bfloat16_errors(kernel.attention, spread=spread) for kernel in (compiled, fused)), strict=True):
        assert ours <= 1.05 * theirs


@pytest.mark.parametrize("shape", [(3, 8, 2, 200, 16, 16), (1, 8, 1, 256, 16, 16)], ids=["many heads", "few heads"])
def test_the_number_of_threads_changes_no_bit(shape) -> None:
    tensors, before, found = draw(shape, dtype=torch.float64), torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(results(compiled.attention, tensors))
    torch.set_num_threads(before)
    assert_same(found[0], results(plain.attention, tensors), 1e-12)
    assert all(torch.equal(one, other) for run in found[1:] for one, other in zip(found[0], run, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_honoured(name, counted) -> None:
    tensors = draw((1, 4, 2, 20, 8, 8), dtype=torch.float64)
    found = results(compiled.attention, tensors, mask=MASKS[name])
    assert_same(found, results(plain.attention, tensors, mask=MASKS[name]), 1e-12)
    assert len(counted) == (name != "positions")  # descending ones


def test_documents_of_every_row_are_its_own(counted) -> None:
    ids = torch.tensor([[0] * 70, [3] * 64 + [1] * 6, list(range(70))])
    tensors, mask = draw((3, 2, 1, 70, 8, 8), dtype=torch.float64), AttentionMask(document_ids=ids)
    assert_same(results(compiled.attention, tensors, mask=mask), results(plain.attention, tensors, mask=mask), 1e-12)
    assert len(counted) == 1


def test_queries_in_places_of_their_own_meet_other_keys(counted) -> None:
    """As a rank of context parallelism calls it: its queries, everybody's keys; those ahead of all keys see them all."""
    tensors = draw((1, 4, 2, 90, 8, 8), dtype=torch.float64)
    tensors[0], tensors[3] = tensors[0][:, :, :20], tensors[3][:, :, :20]
    mask = AttentionMask(positions=torch.cat((torch.arange(10), torch.arange(85, 95))).unsqueeze(0))
    assert_same(results(compiled.attention, tensors, mask=mask), results(plain.attention, tensors, mask=mask), 1e-12)
    assert len(counted) == 1


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    tensors = draw((1, 2, 1, 20, 8, 8), dtype=torch.float64)
    tensors[1:3] = [tensor[:, :, :9] for tensor in tensors[1:3]]
    mask = AttentionMask(positions=(torch.arange(20) - 5).unsqueeze(0))
    found = results(compiled.attention, tensors, mask=mask)
    assert not found[0][:, :, :5].any()
    assert_same(found, results(plain.attention, tensors, mask=mask), 1e-12)


@pytest.mark.parametrize("mask", [CAUSAL, AttentionMask(causal=False), AttentionMask(window=9)], ids=str)
def test_gradients_flow_through_the_log_sum_exp(mask) -> None:
    tensors = draw((2, 4, 2, 70, 8, 24), dtype=torch.float64)
    grad_lse = torch.randn(2, 4, 70, dtype=torch.float64)

    def both(function: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        out, lse = function(*inputs, mask=mask, scale=0.3)
        only_lse = torch.autograd.grad(lse, inputs[:2], grad_lse, retain_graph=True)
        return [out.detach(), lse.detach(), *only_lse, *torch.autograd.grad((out, lse), inputs, (tensors[3], grad_lse))]

    assert_same(both(compiled.attention_with_lse), both(plain.attention_with_lse), 1e-12)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_in_ascending_places_of_their_own(window, causal, counted) -> None:
    """As a rank of context parallelism meets the keys of two runs; every row has its own places, some of them equal."""
    tensors = draw((2, 4, 2, 90, 8, 8), dtype=torch.float64)
    tensors[0], tensors[3] = tensors[0][:, :, :20], tensors[3][:, :, :20]
    keyed = torch.stack((torch.cat((torch.arange(40), torch.arange(60, 110))), torch.arange(90) // 2))
    mask = AttentionMask(causal=causal, window=window, positions=torch.arange(50, 70).unsqueeze(0), key_positions=keyed)
    assert_same(results(compiled.attention, tensors, mask=mask), results(plain.attention, tensors, mask=mask), 1e-12)
    assert len(counted) == 1


def test_dropout_keys_out_of_order_and_empty_tensors_go_to_torch(counted) -> None:
    tensors = draw((2, 2, 1, 10, 8, 8), dtype=torch.float32)
    places = torch.arange(10).flip(0).unsqueeze(0)
    for mask in (AttentionMask(key_positions=places), attrs.evolve(CAUSAL, positions=places)):
        results(compiled.attention, tensors, mask=mask)
    results(compiled.attention, tensors, mask=AttentionMask(positions=places * 0, document_ids=places))
    results(compiled.attention, tensors, dropout=0.5)
    results(compiled.attention, [tensor[:0] for tensor in tensors])
    results(compiled.attention, [tensor.half() for tensor in tensors])
    assert not counted


def test_shapes_that_do_not_belong_together_are_left_to_torch(counted) -> None:
    query, key, value, _ = draw((2, 4, 2, 10, 8, 8), dtype=torch.float32)
    wrong = [
        (query, key[..., :7], value),
        (query, key, value[:, :, :9]),
        (query, key[:1], value[:1]),
        (query[:, :3], key, value),
    ]
    for tensors in wrong:
        with suppress(RuntimeError):  # some of them broadcast
            compiled.attention(*tensors, mask=CAUSAL, scale=0.3)
    assert not counted


def test_nothing_of_size_queries_by_keys_is_kept() -> None:
    tensors = draw((1, 2, 1, 256, 8, 8), dtype=torch.float32)
    kept: list[int] = []
    inputs = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        compiled.attention(*inputs, mask=CAUSAL, scale=0.3)
    assert max(kept) == 2 * 256 * 8
