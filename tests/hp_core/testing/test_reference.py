"""What a cell's model and batch contain."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_core.testing.cell import ModelCase
from hp_core.testing.reference import IGNORED, make_batch, random_model

CASE = ModelCase(
    adapter="qwen3_moe",
    config={
        "vocab_size": 16,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    freeze=("*.mlp.gate.*",),
)


def spread(tensor: Tensor) -> float:
    return float(tensor.detach().double().std())


def test_every_parameter_is_random() -> None:
    for name, parameter in random_model(CASE, seed=0, dtype="float64").named_parameters():
        assert parameter.dtype == torch.float64
        assert spread(parameter) > 0.01, name
        if "norm" in name:
            assert float(parameter.detach().mean()) > 0.5, name


def test_a_seed_gives_the_same_model_in_every_dtype() -> None:
    double, single = random_model(CASE, seed=3, dtype="float64"), random_model(CASE, seed=3, dtype="float32")
    for left, right in zip(double.parameters(), single.parameters(), strict=True):
        assert torch.equal(left.float(), right)
    assert not torch.equal(next(random_model(CASE, seed=4, dtype="float32").parameters()), next(single.parameters()))


def test_frozen_parameters_are_those_that_match() -> None:
    frozen = [name for name, p in random_model(CASE, seed=0, dtype="float32").named_parameters() if not p.requires_grad]
    assert frozen == ["model.layers.0.mlp.gate.weight"]


def test_labels_are_the_next_tokens_and_ignored_unevenly() -> None:
    batch = make_batch(CASE, seed=0)
    counted = (batch.labels != IGNORED).sum(1).tolist()
    assert counted[:2] == [64, 64]
    assert all(0 < count < 16 for count in counted[2:])
    assert batch.tokens == sum(counted)
    shifted = batch.input_ids[:, 1:]
    kept = batch.labels[:, :-1] != IGNORED
    assert torch.equal(batch.labels[:, :-1][kept], shifted[kept])


def test_rows_of_a_batch_stay_together() -> None:
    batch = make_batch(CASE, seed=0)
    part = batch.rows(slice(1, 3))
    assert torch.equal(part.labels, batch.labels[1:3])
    assert part.position_ids.shape == (2, 64)
