"""VocabEmbedding against nn.Embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hp_components.kernels.embedding import embedding
from hp_components.vocab_embedding import VocabEmbedding
from hp_core.errors import PlanError
from hp_core.models.state import update

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


def test_the_rows_come_from_the_kernel_of_the_plan() -> None:
    ours = VocabEmbedding(module=nn.Embedding(8, 4, padding_idx=3))
    calls = []

    def counted(ids: Tensor, weight: Tensor, **place: Any) -> Tensor:
        calls.append(place)
        return embedding(ids, weight, **place)

    update(ours, "embed", kernels={"embedding": counted})
    assert torch.equal(ours(IDS), ours.weight[IDS])
    assert calls == [{"first": 0, "total": 8, "padding": 3}]


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
