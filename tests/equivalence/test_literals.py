"""Numbers that can be checked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from qwen3_moe_cells import BASE
from torch import Tensor, nn

from hp_components.linear_cross_entropy import LinearCrossEntropy
from hp_core.applier.apply import apply
from hp_core.contracts import ParallelBinding
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.models.build import build
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict
from hp_core.testing.ranks import run_ranks

pytestmark = pytest.mark.distributed


def split_vocabulary() -> tuple[float, float]:
    """The loss for logits 0, 1, 2, 3 and label 3 with two logits on each rank, and the sum of the logits' gradients."""
    mesh = MeshContext.create(Topology(tp=2))
    head = LinearCrossEntropy(module=nn.Linear(1, 4, bias=False))
    head.bind_parallel(ParallelBinding(mesh=mesh))
    first = 2 * mesh.axis("tp").rank
    head.weight = nn.Parameter(torch.tensor([[0.0 + first], [1.0 + first]]))
    with head.bind_labels(torch.tensor([[3]])):
        loss = head(torch.ones(1, 1, 1))
    loss.sum().backward()
    assert head.weight.grad is not None
    return float(loss.detach()), float(head.weight.grad.sum())


def test_cross_entropy_over_a_split_vocabulary() -> None:
    (loss, gradient), (other_loss, other_gradient) = run_ranks(2, split_vocabulary)
    assert loss == other_loss == pytest.approx(0.4402, abs=5e-5)
    assert gradient + other_gradient == pytest.approx(0.0, abs=1e-6)


VOCABULARY = 151_936  # Qwen3's own
SIZES = {"num_hidden_layers": 2, "attention_bias": False, "vocab_size": VOCABULARY}


def first_loss(topology: Topology) -> float:
    """The mean token loss of a freshly initialised model."""
    data: dict[str, Any] = {
        "model": {"adapter": "qwen3_moe", "config": {**BASE, **SIZES}},
        "mesh": {"tp": topology.tp, "dp_shard": topology.dp_shard},
    }
    mesh = MeshContext.create(topology)
    built = build(recipe_from_dict(data, plugins=load_plugins()), mesh=mesh)
    model: Any = apply(built.model, built.plan, mesh)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, 65), generator=generator)
    with torch.no_grad():
        losses: Tensor = model(
            input_ids=tokens[:, :-1], position_ids=torch.arange(64)[None], hp_labels=tokens[:, 1:].contiguous()
        ).logits
    return float(losses.mean())


def test_the_first_loss_is_that_of_guessing_on_every_mesh() -> None:
    found = [loss for mesh in MESHES for loss in run_ranks(mesh.world, first_loss, mesh)]
    assert found[0] == pytest.approx(math.log(VOCABULARY), abs=0.05)
    assert math.log(VOCABULARY) == pytest.approx(11.931, abs=5e-4)
    assert all(loss == pytest.approx(found[0], rel=1e-6) for loss in found)


MESHES = [Topology(), Topology(tp=2), Topology(dp_shard=2)]
