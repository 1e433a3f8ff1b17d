"""FSDP2's collectives by exchange: torch's values, and really taken by a wrapped unit on gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from hp_core.applier.exchange import ExchangedReduceScatter, install_exchange
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks


def part(ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's part by exchange, and the sum of the same parts in float64."""
    mesh = MeshContext.create(Topology(dp_shard=ranks))
    axis = mesh.axis("fsdp")
    every = torch.randn(ranks, ranks * 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = torch.empty(5, dtype=dtype)
    ExchangedReduceScatter(axis)(found, every[axis.rank].clone(), axis.group, dist.ReduceOp.SUM)
    expected = every.double().sum(0)[axis.rank * 5 :][:5]
    return found, expected.to(dtype)


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float64), (2, torch.bfloat16), (4, torch.float32)])
def test_each_rank_gets_the_sum_of_its_part(ranks: int, dtype: torch.dtype) -> None:
    for found, expected in run_ranks(ranks, part, ranks, dtype):
        torch.testing.assert_close(found, expected)


def gradient_without_torchs_own() -> Tensor:
    """The gradient of a wrapped layer on two ranks, where no collective of torch may be called."""
    mesh = MeshContext.create(Topology(dp_shard=2))
    layer = nn.Linear(4, 2, bias=False)
    nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=mesh.storage("dense"))
    layer.set_gradient_divide_factor(1.0)
    layer.set_force_sum_reduction_for_comms(True)
    install_exchange(layer, axis=mesh.axis("fsdp"))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a collective of torch ran")

    dist.reduce_scatter_single = dist.all_gather_single = dist.all_to_all_single = refuse
    layer(torch.full((1, 4), float(mesh.axis("fsdp").rank + 1))).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.to_local().clone()


@pytest.mark.distributed
def test_a_unit_s_gradients_go_through_the_exchange() -> None:
    for local in run_ranks(2, gradient_without_torchs_own):
        assert torch.equal(local, torch.full((1, 4), 3.0))
