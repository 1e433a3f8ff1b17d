"""VocabEmbedding against nn.Embedding, whole and cut over two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from hp_components.embedding_lookup import embedding_lookup
from hp_components.vocab_embedding import VocabEmbedding
from hp_core.errors import PlanError

IDS = torch.tensor([[3, 0, 3, 7], [1, 3, 2, 0]])


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_and_gradient_are_torchs(padding) -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(8, 4, padding_idx=padding, dtype=torch.float64)
    ours = VocabEmbedding(module=plain)
    grad = torch.randn(2, 4, 4, dtype=torch.float64)
    expected, found = plain(IDS), ours(input=IDS)
    assert torch.equal(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(output, plain.weight, grad)[0] for output in (found, expected)), rtol=0, atol=1e-12
    )


def test_parameter_is_the_very_same_and_keeps_its_training_flag() -> None:
    with torch.device("meta"):
        plain = nn.Embedding(8, 4, padding_idx=-1).eval()
    ours = VocabEmbedding(module=plain)
    assert ours.weight is plain.weight
    assert (ours.padding_idx, ours.training) == (7, False)


def test_can_be_built_from_a_configuration() -> None:
    ours = VocabEmbedding(config=PretrainedConfig(vocab_size=8, hidden_size=4, pad_token_id=-1, dtype="bfloat16"))
    assert (tuple(ours.weight.shape), ours.weight.dtype, ours.padding_idx) == ((8, 4), torch.bfloat16, 7)


def test_shards_give_zero_rows_for_ids_of_others_and_add_up() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    shards = [weight.detach()[:4].clone().requires_grad_(), weight.detach()[4:].clone().requires_grad_()]
    parts = [embedding_lookup(IDS, shard, first=4 * rank, total=8, padding=3) for rank, shard in enumerate(shards)]
    assert torch.equal(parts[1] != 0, (IDS == 7).unsqueeze(-1).expand(2, 4, 4))
    whole = nn.functional.embedding(IDS, weight, padding_idx=3)
    assert torch.equal(parts[0] + parts[1], whole)
    grad = torch.randn_like(whole)
    (expected,) = torch.autograd.grad(whole, weight, grad)
    found = torch.cat([torch.autograd.grad(part, shard, grad)[0] for part, shard in zip(parts, shards, strict=True)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_an_id_outside_the_vocabulary_cannot_pass_unseen() -> None:
    weight = torch.ones(4, 2)
    assert embedding_lookup(torch.tensor([9, 1]), weight, first=0, total=8, padding=None)[0].isnan().all()
    with pytest.raises(IndexError):
        embedding_lookup(torch.tensor([9]), weight, first=0, total=4, padding=None)


def test_gradient_of_a_frequent_id_is_summed_in_fp32() -> None:
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    output = embedding_lookup(torch.zeros(1024, dtype=torch.long), weight, first=0, total=2, padding=None)
    (grad,) = torch.autograd.grad(output, weight, torch.ones_like(output))
    assert grad.flatten().tolist() == [1024.0, 0.0]  # a running bf16 sum of ones stops at 256


def test_a_tied_weight_adds_both_gradients() -> None:
    plain = nn.Embedding(8, 4, dtype=torch.float64)
    ours = VocabEmbedding(module=plain)
    grads = [torch.autograd.grad((module(IDS) @ module.weight.t()).square().sum(), plain.weight)[0] for module in (ours, plain)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"max_norm": 1.0}, "max_norm=1.0; expected max_norm=None"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True; expected scale_grad_by_freq=False"),
        ({"sparse": True}, "sparse=True; expected sparse=False"),
    ],
)
def test_other_semantics_are_refused(option, text) -> None:
    with pytest.raises(PlanError) as caught:
        VocabEmbedding(module=nn.Embedding(8, 4, **option))
    assert str(caught.value) == f"HP541: vocab_embedding cannot replace a module with {text}. fix: keep the original module"


def test_a_module_without_a_weight_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        VocabEmbedding(module=nn.Identity())
    assert str(caught.value) == (
        "HP541: vocab_embedding cannot replace a module with no weight; expected a parameter weight with 2 dims. "
        "fix: keep the original module"
    )


def test_something_to_build_from_is_required() -> None:
    with pytest.raises(PlanError) as caught:
        VocabEmbedding()
    assert str(caught.value) == "HP560: vocab_embedding got neither config nor module; expected config=... or module=..."
