"""Recompute: same gradients, the forward runs again, and selective keeps matrix products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hp_core.applier.recompute import install_recompute, keeps
from hp_core.contracts.plan import RecomputePlan
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, dtype=torch.float64)
        self.runs = 0

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        self.runs += 1
        return torch.sin(self.proj(torch.tanh(hidden)) * scale)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, scale=0.5)
        return hidden


def gradients(mode: str | None) -> tuple[list[Tensor], list[int]]:
    model = Model()
    if mode:
        install_recompute(model, RecomputePlan(fqn="layers.1", mode=mode))  # type: ignore[arg-type]
    model(torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters()], [layer.runs for layer in model.layers]  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_layer_gives_the_same_gradients_and_runs_twice(mode: str) -> None:
    plain, once = gradients(None)
    again, runs = gradients(mode)
    assert once == [1, 1]
    assert runs == [1, 2]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


class Nested(nn.Module):
    """A layer with an FSDP unit of its own inside it, before something that must be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = (nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.sin(self.outer(torch.tanh(self.inner(torch.sin(hidden)))))


def nested_gradients(mode: str | None) -> list[Tensor]:
    context = MeshContext.create(Topology(dp_shard=2, ep=2))
    mesh, alone = context.storage("dense"), context.storage("expert")  # the inner unit is cut over one rank, as experts may be
    model = nn.Sequential(Nested(), Nested())
    if mode:
        install_recompute(model, RecomputePlan(fqn="0", mode=mode))  # type: ignore[arg-type]
    for layer in model:
        fully_shard([layer.inner], mesh=alone)
        fully_shard([layer], mesh=mesh)
    fully_shard([model], mesh=mesh)
    model(torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)).sum().backward()
    return [layer.outer.weight.grad.full_tensor() for layer in model]


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_recomputed_layer_may_hold_an_fsdp_unit(mode: str) -> None:
    (plain, _), (again, _) = run_ranks(2, nested_gradients, None), run_ranks(2, nested_gradients, mode)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_without_gradients_nothing_is_kept_or_run_again() -> None:
    model = Model()
    install_recompute(model, RecomputePlan(fqn="layers.0", mode="full"))
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.float64))
    assert model.layers[0].runs == 1


KEPT = [
    (torch.ops.aten.mm.default, True),
    (torch.ops.aten.bmm.default, True),
    (torch.ops.aten._grouped_mm.default, True),
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, True),
    (torch.ops.aten.mm.out, False),
    (torch.ops.aten.mul.Tensor, False),
    (torch.ops.aten.topk.default, False),
]


@pytest.mark.parametrize(("operator", "kept"), KEPT)
def test_selective_keeps_products_that_nobody_writes_to(operator: torch._ops.OpOverload, kept: bool) -> None:
    assert keeps(operator) is kept
