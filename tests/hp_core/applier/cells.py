"""One small Qwen3-MoE on any mesh and in plain Hugging Face, with the same weights and batch; runs on forked ranks."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from hp_core.applier.apply import apply
from hp_core.applier.view import local
from hp_core.contracts.plan import BuildPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.models.build import build
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict
from hp_core.recipe.schema import Recipe
from hp_core.state.full import full_gradients, full_state
from hp_core.state.slices import fill
from hp_core.state.transforms import Block, forward, source_shape, strands
from hp_core.testing.promote import promote

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "mlp_only_layers": [0],  # one dense layer beside the mixtures
    "tie_word_embeddings": False,
}
ROWS, SEQUENCE = 4, 16


@attrs.frozen(kw_only=True)
class Cell:
    """One configuration: ``mesh`` and ``config`` change the defaults, ``recipe`` adds sections."""

    mesh: Mapping[str, Any] = attrs.field(factory=dict)
    config: Mapping[str, Any] = attrs.field(factory=dict)
    recipe: Mapping[str, Any] = attrs.field(factory=dict)

    def load(self, *, dtype: str = "float64") -> Recipe:
        """Return the cell's recipe."""
        model = {"adapter": "qwen3_moe", "config": {**CONFIG, **self.config}, "dtype": dtype}
        precision = {"reduce": "float64" if dtype == "float64" else "float32"}
        data = {"model": model, "precision": precision, "mesh": dict(self.mesh), **self.recipe}
        return recipe_from_dict(data, plugins=load_plugins())


@attrs.frozen(kw_only=True)
class Outcome:
    """Loss of the global batch, every gradient whole (None: none), and the digest of the initial weights."""

    loss: float
    gradients: dict[str, Tensor | None]
    initial: str = ""


def batch() -> tuple[Tensor, Tensor]:
    """Return ids and shifted labels [4, 16]: one row without any label, one with nearly none."""
    generator = torch.Generator().manual_seed(7)
    ids, labels = torch.randint(0, 64, (2, ROWS, SEQUENCE), generator=generator)
    labels[0, 3:] = -100
    labels[2] = -100
    return ids, labels


def value(fqn: str, shape: tuple[int, ...]) -> Tensor:
    """Return random weights for a parameter in Hugging Face's shape: nothing is one or zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(fqn.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2 + (1.0 if "norm" in fqn else 0.0)


def reference(config: Mapping[str, Any]) -> Outcome:
    """Return what the unmodified Hugging Face model computes in one process."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with promote():
        model = Qwen3MoeForCausalLM._from_config(
            Qwen3MoeConfig(**{**CONFIG, **config}),
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        for name, parameter in model.named_parameters():
            parameter.data.copy_(value(name, tuple(parameter.shape)))
        ids, labels = batch()
        logits = model(input_ids=ids, use_cache=False).logits
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        loss = total / (labels != -100).sum()
        loss.backward()
    return Outcome(loss=loss.item(), gradients={name: parameter.grad for name, parameter in model.named_parameters()})


def run_cells(cells: Mapping[str, Cell]) -> dict[str, Outcome]:
    """Return every cell's outcome, one after the other on the ranks that are there."""
    return {name: run_cell(cell) for name, cell in cells.items()}


def run_cell(cell: Cell) -> Outcome:
    """Return what a cell computes on this job's ranks; gradients are whole and equal on all of them."""
    start_single()
    with promote():
        model, plan, mesh = make(cell.load())
        initial = digest(full_state(model, plan))
        set_weights(model, plan)
        loss = step(model, mesh)
    check_gradients(model)
    check_local(model, mesh)
    return Outcome(loss=loss, gradients=full_gradients(model, plan), initial=initial)


def make(recipe: Recipe) -> tuple[nn.Module, BuildPlan, MeshContext]:
    """Return the recipe's model, live on all ranks of the job."""
    mesh = MeshContext.create(recipe.topology(world=dist.get_world_size()))
    built = build(recipe, mesh=mesh)
    return apply(built.model, built.plan, mesh), built.plan, mesh


def set_weights(model: nn.Module, plan: BuildPlan) -> None:
    """Give every parameter the weights of :func:`value`."""
    for entry in plan.parameters:
        (strand,) = strands(entry.transforms, entry.shape)
        whole = value(entry.fqn, source_shape(strand.steps, entry.shape))
        start = tuple(0 for _ in whole.shape)
        for block in forward(strand.steps, [Block(whole, start)], shape=entry.shape):
            fill(model.get_parameter(entry.fqn), block)


def step(model: nn.Module, mesh: MeshContext) -> float:
    """Run a forward and a backward on this rank's rows and return the loss of the global batch."""
    ids, labels = batch()
    valid, rows = (labels != -100).sum(), ROWS // mesh.data.size
    mine = slice(mesh.data.rank * rows, (mesh.data.rank + 1) * rows)
    positions = torch.arange(SEQUENCE).expand(rows, -1)
    losses = model(input_ids=ids[mine], position_ids=positions, hp_labels=labels[mine]).logits
    loss = losses.sum() / valid
    loss.backward()
    total = loss.detach().clone()
    if mesh.data.size > 1:
        dist.all_reduce(total, group=mesh.data.group)
    return float(total)


def check_gradients(model: nn.Module) -> None:
    """No gradient is Partial on any mesh: whoever reads ``.grad`` sees a finished sum."""
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if isinstance(parameter.grad, DTensor):
            assert not any(isinstance(placement, Partial) for placement in parameter.grad.placements), name


def check_local(model: nn.Module, mesh: MeshContext) -> None:
    """A local view outside the forward is refused exactly where FSDP holds the parameter in parts."""
    norm = model.get_submodule("model.layers.1.input_layernorm")
    if mesh.storage("dense").size() == 1:
        local(norm, "weight")
        return
    with pytest.raises(PlanError) as error:
        local(norm, "weight")
    assert str(error.value) == (
        "HP552: a local view of model.layers.1.input_layernorm.weight is asked for while FSDP holds it in parts; "
        "expected a call from inside the forward of the unit that holds it. "
        "fix: move the call, or assemble the whole parameter with hp_core.state.slices.assemble"
    )


def digest(state: Mapping[str, Tensor]) -> str:
    """Return a hash of all tensors, by name."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode() + state[name].contiguous().numpy().tobytes())
    return found.hexdigest()
