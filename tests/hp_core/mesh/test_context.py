"""MeshContext: membership as the topology says, few groups, and FSDP2 that trains on its meshes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hp_core.applier.collectives import identity
from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup, MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.testing.patience import HANG_S
from hp_core.testing.ranks import run_forked, run_ranks

TOPOLOGIES = [
    Topology(),
    Topology(tp=2),
    Topology(dp_shard=2),
    Topology(dp_replicate=2),
    Topology(tp=2, dp_shard=2, ep=2),
    Topology(tp=2, dp_shard=4, ep=4),
    Topology(tp=2, cp=2, dp_shard=2, ep=4),
    Topology(pp=2, dp_replicate=2, dp_shard=2, cp=2, ep=2),
]
IDS = [str(topology) for topology in TOPOLOGIES]


@pytest.fixture
def fake_group() -> Iterator[Any]:
    """Return a function that makes this process one rank of a job that does not exist."""

    def start(rank: int, world: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
def test_every_axis_has_the_ranks_that_the_topology_says(topology: Topology, fake_group: Any) -> None:
    for rank in range(topology.world):
        fake_group(rank, topology.world)
        context = MeshContext.create(topology)
        for name in ("activation", "dense", "expert"):
            view = topology.view(name)
            for axis in view.names:
                found = context.axis(axis)
                assert (found.name, found.size, found.rank) == (axis, view.size(axis), view.coordinates(rank)[axis])
                if found.size == 1:
                    assert found.group is None
                else:
                    assert tuple(dist.get_process_group_ranks(found.group)) == view.group(rank, axis)
        dist.destroy_process_group()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
def test_storage_meshes_hold_the_ranks_of_their_view(topology: Topology, fake_group: Any) -> None:
    fake_group(0, topology.world)
    context = MeshContext.create(topology)
    for view, axis in (("dense", "fsdp"), ("expert", "efsdp")):
        mesh = context.storage(view)  # type: ignore[arg-type]
        names = ("dp_replicate", axis) if topology.dp_replicate > 1 else (axis,)
        assert mesh.mesh_dim_names == names
        assert mesh.shape == tuple(topology.degree(name) for name in names)


def test_data_is_the_part_of_the_batch_that_a_rank_reads(fake_group: Any) -> None:
    topology = Topology(dp_replicate=2, dp_shard=2, tp=2)
    parts = []
    for rank in range(8):
        fake_group(rank, 8)
        data = MeshContext.create(topology).data
        parts.append((data.rank, data.size))
        dist.destroy_process_group()
    assert parts == [(0, 4), (0, 4), (1, 4), (1, 4), (2, 4), (2, 4), (3, 4), (3, 4)]


def created_groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the list that will hold the ranks of every communicator that a mesh creates."""
    created: list[tuple[int, ...]] = []
    original = dist.device_mesh.new_group  # type: ignore[attr-defined]

    def counting(ranks: Sequence[int], *, backend: str | None, **others: Any) -> Any:
        if backend != "fake":
            created.append(tuple(ranks))
        return original(ranks=ranks, backend=backend, **others)

    monkeypatch.setattr(dist.device_mesh, "new_group", counting)
    return created


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=IDS)
def test_each_set_of_ranks_is_one_communicator(topology: Topology, fake_group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    created = created_groups(monkeypatch)
    fake_group(0, topology.world)
    context = MeshContext.create(topology)
    views = [topology.view(name) for name in ("activation", "dense", "expert")]
    needed = {group for view in views for axis in view.names for group in view.groups(axis)}
    if topology.dp_replicate > 1 and topology.dp_shard > 1:
        needed |= {tuple(dist.get_process_group_ranks(context.data.group)), *created}
    world = tuple(range(topology.world))  # the default group stands for an axis that covers every rank
    assert sorted(created) == sorted(group for group in needed if len(group) > 1 and group != world)


def test_axes_over_the_same_ranks_share_their_group(fake_group: Any) -> None:
    fake_group(0, 8)
    context = MeshContext.create(Topology(tp=2, dp_shard=4, ep=2))
    assert context.axis("fsdp").group is context.axis("dp_shard").group is context.axis("efsdp").group
    assert context.axis("ep").group is context.axis("tp").group


def test_a_job_of_another_size_is_refused(fake_group: Any) -> None:
    fake_group(0, 4)
    with pytest.raises(PlanError) as raised:
        MeshContext.create(Topology(tp=2))
    assert str(raised.value) == (
        "HP501: pp * dp_replicate * dp_shard * cp * tp = 1 * 1 * 1 * 1 * 2 = 2, but the job has 4 processes; "
        "expected degrees that multiply to 4. mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1. "
        "fix: start 2 processes, or set dp_shard to -1"
    )


def test_a_mesh_without_a_process_group_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        MeshContext.create(Topology(tp=2))
    assert str(raised.value) == (
        "HP501: torch.distributed is not initialised; expected a process group of 2 ranks. "
        "mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1. "
        "fix: start the job with torchrun, or call hp_core.mesh.context.start_single() for one process"
    )


def test_an_unknown_axis_is_refused(fake_group: Any) -> None:
    fake_group(0, 1)
    with pytest.raises(PlanError) as raised:
        MeshContext.create(Topology()).axis("tpp")
    assert str(raised.value).startswith("HP503: there is no mesh axis 'tpp'; did you mean 'tp'?")


class TwoLayers(nn.Module):
    """A column-wise and a row-wise product, the first of which may be cut over tp; odd sizes make FSDP pad."""

    def __init__(self) -> None:
        super().__init__()
        self.tp = AxisGroup("tp", 0, 1)
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(6, 5, generator=generator, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        up = self.up
        local = up.to_local() if isinstance(up, DTensor) else up
        return (x * identity(self.scale, axis=self.tp)) @ local.T


def batch(part: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 + part), dtype=torch.float64)


def trained_alone(parts: int) -> list[Tensor]:
    model = TwoLayers()
    sum((model(batch(part)) ** 2).sum() for part in range(parts)).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return [parameter.detach() for parameter in model.parameters()]


def trained_on(topology: Topology) -> list[Tensor]:
    """The parameters after one step on the mesh, assembled. Every tp rank computes its rows of the output."""
    if topology.world == 1:
        start_single()
    context = MeshContext.create(topology)
    model = TwoLayers()
    if topology.tp > 1:
        model.up = nn.Parameter(distribute_tensor(model.up.detach(), context.submesh("tp"), [Shard(0)]))
        model.tp = context.axis("tp")
    fully_shard(model, mesh=context.storage("dense"))
    assert isinstance(model, FSDPModule)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    (model(batch(context.data.rank)) ** 2).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    return [parameter.full_tensor().detach() for parameter in model.parameters() if isinstance(parameter, DTensor)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "topology",
    [Topology(dp_shard=2), Topology(dp_replicate=2), Topology(tp=2, dp_shard=2), Topology(dp_replicate=2, dp_shard=2)],
    ids=str,
)
def test_fsdp_trains_one_step_as_one_process_does(topology: Topology) -> None:
    expected = trained_alone(topology.data)
    for found in run_ranks(topology.world, trained_on, topology):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.distributed
def test_hsdp_trains_a_tp_parameter() -> None:
    expected = trained_alone(2)
    for found in run_ranks(4, trained_on, Topology(dp_replicate=2, tp=2)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.distributed
def test_one_process_trains_without_a_port() -> None:
    torch.testing.assert_close(run_forked(trained_on, Topology()), trained_alone(1), rtol=1e-12, atol=1e-12)


def test_degree_one_needs_nothing_that_another_import_brings() -> None:
    code = (
        "from hp_core.mesh.context import MeshContext, start_single; from hp_core.mesh.topology import Topology; "
        "start_single(); MeshContext.create(Topology())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)
