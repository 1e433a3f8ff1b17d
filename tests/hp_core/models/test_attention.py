"""The attention behind Hugging Face's registries against an explicit softmax, and everything that it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hp_core.contracts import AttentionMask, CPContext, KeyValue, ParallelBinding
from hp_core.errors import PlanError
from hp_core.models.attention import JUMPS, causal_attention, no_mask, register
from hp_core.models.state import update


class Causal(nn.Module):
    is_causal = True


def reference(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeat, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ value).transpose(1, 2)


def tensors(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, n, 7, 4, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))  # type: ignore[return-value]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_equals_an_explicit_causal_softmax(kv_heads: int) -> None:
    query, key, value = tensors(4, kv_heads)
    out, weights = causal_attention(Causal(), query, key, value, None, scaling=0.3, position_ids=None, use_cache=False)
    assert weights is None
    torch.testing.assert_close(out, reference(query, key, value, 0.3), rtol=0, atol=1e-12)


def test_dropout_is_passed_through() -> None:
    query, key, value = tensors(4, 2)
    plain, _ = causal_attention(Causal(), query, key, value, None)
    dropped, _ = causal_attention(Causal(), query, key, value, None, dropout=0.9)
    assert not torch.equal(plain, dropped)


def test_the_kernel_that_the_plan_chose_for_the_module_computes_it() -> None:
    module, calls = Causal(), []

    def kernel(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        calls.append(options)
        return query

    update(module, "self_attn", kernels={"attention": kernel})
    query, key, value = tensors(4, 2)
    out, _ = causal_attention(module, query, key, value, None, dropout=0.5)
    assert calls == [{"mask": AttentionMask(), "scale": 0.5, "dropout": 0.5}]
    assert torch.equal(out, query.transpose(1, 2))


def test_registering_makes_both_registries_know_it() -> None:
    register()
    register()
    assert AttentionInterface()["hp"] is causal_attention
    assert AttentionMaskInterface()["hp"] is no_mask


REFUSED = [
    (
        {"attention_mask": torch.zeros(1, 1, 7, 7)},
        "a dense attention mask (1, 1, 7, 7) is passed",
        "pass no 4-D attention_mask",
    ),
    ({"sliding_window": 4}, "sliding_window is 4 at sequence length 7", "a shorter sequence"),
    ({"is_causal": False}, "the attention is not causal", "a causal language model"),
    ({"softcap": 30.0}, "softcap is passed", "a model without it"),
    ({"s_aux": torch.zeros(4)}, "s_aux is passed", "a model without it"),
]


@pytest.mark.parametrize(("arguments", "what", "fix"), REFUSED)
def test_what_changes_the_scores_is_refused(arguments: dict[str, object], what: str, fix: str) -> None:
    query, key, value = tensors(4, 2)
    with pytest.raises(PlanError) as error:
        causal_attention(Causal(), query, key, value, **{"attention_mask": None, **arguments})
    assert str(error.value) == (f"HP554: {what}; expected plain causal attention over whole rows. attention 'hp'. fix: {fix}")


def test_a_window_that_hides_nothing_is_accepted() -> None:
    query, key, value = tensors(4, 2)
    windowed, _ = causal_attention(Causal(), query, key, value, None, sliding_window=7)
    assert torch.equal(windowed, causal_attention(Causal(), query, key, value, None)[0])


def test_a_cache_is_refused() -> None:
    query, key, value = tensors(4, 2)
    with pytest.raises(PlanError) as error:
        causal_attention(Causal(), query[:, :, :1], key, value, None)
    assert str(error.value) == (
        "HP554: 1 queries meet 7 keys (a cache); expected plain causal attention over whole rows. "
        "attention 'hp'. fix: pass use_cache=False"
    )


def test_no_mask_is_built() -> None:
    assert no_mask(attention_mask=None, batch_size=2, q_length=7) is None
    assert no_mask(attention_mask=torch.ones(2, 7, dtype=torch.bool)) is None


def test_a_mask_that_hides_tokens_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        no_mask(attention_mask=torch.tensor([[True, False]]))
    assert str(error.value) == (
        "HP554: attention_mask hides tokens; expected plain causal attention over whole rows. "
        "attention 'hp'. fix: drop padding: ignore labels with -100 instead"
    )


def test_a_mask_of_the_model_s_own_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        no_mask(allow_is_causal_skip=False, use_vmap=True, device="cpu")
    assert str(error.value) == (
        "HP554: the model overlays a mask of its own; expected plain causal attention over whole rows. "
        "attention 'hp'. fix: a causal language model"
    )


def test_packed_documents_without_ids_are_refused() -> None:
    mask = no_mask(allow_is_causal_skip=False, device="cpu")
    assert mask is JUMPS
    with pytest.raises(PlanError) as error:
        causal_attention(Causal(), *tensors(4, 2), mask, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    assert str(error.value) == (
        "HP554: position_ids restart inside a row (packed documents); expected plain causal attention over whole rows. "
        "attention 'hp'. fix: pass document_ids to the model, or one document per row"
    )


def test_documents_without_a_kernel_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        causal_attention(Causal(), *tensors(4, 2), JUMPS, document_ids=torch.zeros(2, 7, dtype=torch.int64))
    assert str(error.value) == (
        "HP554: document_ids are passed; expected plain causal attention over whole rows. attention 'hp'. "
        "fix: a component that attends within documents, such as gqa_attention"
    )


def test_ids_that_do_not_fit_the_tokens_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        causal_attention(Causal(), *tensors(4, 2), JUMPS, document_ids=torch.zeros(2, 8, dtype=torch.int64))
    assert str(error.value) == (
        "HP554: document_ids has the shape (2, 8); expected (2, 7), one for each token. attention 'hp'. "
        "fix: cut them as the tokens are"
    )


class Bound(CPContext):
    """A protocol that returns the queries, and remembers what it was asked."""

    def partition(self, local_length: int) -> Any: ...
    def gather_sequence(self, tensor: Any, *, dim: int) -> Any: ...
    def launch_gather_sequence(self, tensor: Any, *, dim: int) -> Any: ...
    def sequence_to_head(self, tensor: Any, *, seq_dim: int, head_dim: int) -> Any: ...
    def head_to_sequence(self, tensor: Any, *, seq_dim: int, head_dim: int) -> Any: ...

    def attention(self, query: Any, kv: KeyValue, *, mask: AttentionMask, kernel: Any) -> Any:
        self.asked = (kv, mask, kernel)
        return query


def bound(**kernels: Any) -> tuple[nn.Module, Bound]:
    module, context = Causal(), Bound()
    update(module, "attention", binding=ParallelBinding(mesh=None, cp=context), kernels=kernels)
    return module, context


def test_a_bound_module_attends_through_its_protocol() -> None:
    module, context = bound(attention_with_lse=scale_of)
    query, key, value = tensors(4, 2)
    positions = torch.tensor([[0, 1, 2, 9, 10, 11, 12]])
    out, _ = causal_attention(module, query, key, value, JUMPS, scaling=0.3, position_ids=positions)
    kv, mask, kernel = context.asked
    assert torch.equal(out, query.transpose(1, 2))
    assert kv.compact == (key, value)
    assert kv.expand(*kv.compact) == (key, value)
    assert (kv.seq_dim, kv.head_dim, mask, kernel()) == (2, 1, AttentionMask(), 0.3)


def scale_of(*, scale: float) -> float:
    return scale


def test_a_bound_module_needs_a_planned_kernel() -> None:
    with pytest.raises(PlanError) as error:
        causal_attention(bound()[0], *tensors(4, 2), None)
    assert str(error.value) == (
        "HP571: attention over cp has no kernel for attention_with_lse; expected one in the plan. attention 'hp'. "
        "fix: name the operator in the kernels of the adapter's binding request"
    )


def test_a_bound_module_s_positions_may_not_restart() -> None:
    module, _ = bound(attention_with_lse=scale_of)
    with pytest.raises(PlanError) as error:
        causal_attention(module, *tensors(4, 2), JUMPS, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    assert error.value.code == "HP554"
