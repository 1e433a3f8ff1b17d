"""Numbers that can be checked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepseek_cells import BASE as LATENT
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


def latent_gradients(mesh: MeshContext, *, heads: tuple[int, ...]) -> dict[str, Tensor]:
    """The gradients of one attention's latent projections through some of its two heads; the output's gradient is fixed."""
    changes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "attention_bias": False}
    data: dict[str, Any] = {
        "model": {"adapter": "deepseek_v3", "config": {**LATENT, **changes}, "dtype": "float64"},
        "mesh": {"tp": mesh.topology.tp, "sequence_parallel": mesh.topology.sequence_parallel},
    }
    built = build(recipe_from_dict(data, plugins=load_plugins()), mesh=mesh)
    model: Any = apply(built.model, built.plan, mesh)
    attention, width, rank = model.model.layers[0].self_attn, LATENT["v_head_dim"], mesh.axis("tp").rank
    local = attention.o_proj.weight.to_local() if mesh.topology.tp > 1 else attention.o_proj.weight
    with torch.no_grad():
        for place in range(local.shape[1] // width):  # a head that the output does not see contributes nothing
            local[:, place * width : (place + 1) * width] *= float(place + rank in heads)
    generator = torch.Generator().manual_seed(0)
    hidden, wanted = torch.randn((2, 1, 8, 64), generator=generator, dtype=torch.float64)
    angles = torch.randn((2, 1, 8, LATENT["qk_rope_head_dim"]), generator=generator, dtype=torch.float64)
    if mesh.topology.tp > 1 and mesh.topology.sequence_parallel:
        hidden, wanted = hidden.chunk(2, dim=1)[rank], wanted.chunk(2, dim=1)[rank]
    output = attention(hidden, (angles[0], angles[1]))[0]
    (output * wanted).sum().backward()
    return {name: attention.get_parameter(name).grad for name in LATENTS}


LATENTS = ("q_a_proj.weight", "q_a_layernorm.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight")


def latent_gradients_of_one() -> list[dict[str, Tensor]]:
    return [latent_gradients(MeshContext.create(Topology()), heads=(head,)) for head in (0, 1)]


def latent_gradients_of_two(sequence_parallel: bool) -> dict[str, Tensor]:
    return latent_gradients(MeshContext.create(Topology(tp=2, sequence_parallel=sequence_parallel)), heads=(0, 1))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_latent_s_gradient_is_the_sum_of_what_the_shards_contribute_once(sequence_parallel: bool) -> None:
    ((c0, c1),) = run_ranks(1, latent_gradients_of_one)
    for found in run_ranks(2, latent_gradients_of_two, sequence_parallel):
        for name in LATENTS:
            assert float(c0[name].abs().max()) > 0
            assert float(c1[name].abs().max()) > 0
            torch.testing.assert_close(found[name], c0[name] + c1[name], rtol=1e-12, atol=1e-15)


MESHES = [Topology(), Topology(tp=2), Topology(dp_shard=2)]
MODELS = {  # adapter -> configuration with the published vocabulary, and the loss of guessing
    "qwen3_moe": ({**BASE, "num_hidden_layers": 2, "attention_bias": False, "vocab_size": 151_936}, 11.931),
    "deepseek_v3": ({**LATENT, "num_hidden_layers": 2, "attention_bias": False, "vocab_size": 129_280}, 11.770),
}


def first_loss(adapter: str, topology: Topology) -> float:
    """The mean token loss of a freshly initialised model."""
    config = MODELS[adapter][0]
    data: dict[str, Any] = {
        "model": {"adapter": adapter, "config": config},
        "mesh": {"tp": topology.tp, "dp_shard": topology.dp_shard},
    }
    mesh = MeshContext.create(topology)
    built = build(recipe_from_dict(data, plugins=load_plugins()), mesh=mesh)
    model: Any = apply(built.model, built.plan, mesh)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(int(config["vocab_size"]), (1, 65), generator=generator)
    with torch.no_grad():
        losses: Tensor = model(
            input_ids=tokens[:, :-1], position_ids=torch.arange(64)[None], hp_labels=tokens[:, 1:].contiguous()
        ).logits
    return float(losses.mean())


@pytest.mark.parametrize("adapter", MODELS)
def test_the_first_loss_is_that_of_guessing_on_every_mesh(adapter: str) -> None:
    config, guessing = MODELS[adapter]
    found = [loss for mesh in MESHES for loss in run_ranks(mesh.world, first_loss, adapter, mesh)]
    assert found[0] == pytest.approx(math.log(config["vocab_size"]), abs=0.05)
    assert math.log(config["vocab_size"]) == pytest.approx(guessing, abs=5e-4)
    assert all(loss == pytest.approx(found[0], rel=1e-6) for loss in found)
