"""SharedMemory: what sockets would bring, for any sizes and dtypes; and an end where a rank has ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_core.mesh import shared_memory
from hp_core.mesh.context import AxisGroup, MeshContext
from hp_core.mesh.shared_memory import SharedMemory
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks

pytestmark = pytest.mark.distributed
SLOT = 64  # bytes: every message is many parts


def axis_of(ranks: int) -> AxisGroup:
    """Return an axis of all ranks with small slots."""
    shared_memory.LARGEST_SLOT = SLOT
    axis = MeshContext.create(Topology(dp_shard=ranks)).axis("fsdp")
    assert axis.shared is not None
    return axis


def unequal(ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Several exchanges of unequal parts, some empty, some rank idle, by memory and by torch."""
    axis = axis_of(ranks)
    found, expected = [], []
    for turn in range(5):
        rows = torch.randint(0, 9, (ranks, ranks), generator=torch.Generator().manual_seed(turn))
        rows[turn % ranks] = 0
        send, receive = rows[axis.rank].tolist(), rows[:, axis.rank].tolist()
        sent = torch.randn(sum(send), 7).to(dtype)
        for out, target in ((found, axis), (expected, AxisGroup("fsdp", axis.rank, ranks, axis.group))):
            arrived = torch.empty(sum(receive), 7, dtype=dtype)
            target.all_to_all(arrived, sent, receive=receive, send=send)
            out.append(arrived)
    return torch.cat(found), torch.cat(expected)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_unequal_parts_arrive_as_by_sockets(ranks: int, dtype: torch.dtype) -> None:
    for found, expected in run_ranks(ranks, unequal, ranks, dtype):
        assert torch.equal(found, expected)


def gathered(ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """An all-gather from a tensor of its own and from one that lies in the result."""
    axis = axis_of(ranks)
    x = torch.randn(3, 11, generator=torch.Generator().manual_seed(axis.rank))
    apart, within = torch.empty(ranks, 3, 11), torch.empty(ranks, 3, 11)
    axis.all_gather(apart, x)
    axis.all_gather(within, within[axis.rank].copy_(x))
    every = torch.stack([torch.randn(3, 11, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)])
    return apart, within, every


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gather_brings_every_rank_s_tensor(ranks: int) -> None:
    for apart, within, every in run_ranks(ranks, gathered, ranks):
        assert torch.equal(apart, every)
        assert torch.equal(within, every)


def axes(shared: bool) -> list[bool]:
    """Whether the axes of a mesh share memory, and whether equal groups share the same."""
    mesh = MeshContext.create(Topology(tp=2, dp_shard=2, ep=2, shared_memory=shared))
    names = ("tp", "ep", "fsdp", "efsdp", "cp")
    same = mesh.axis("tp").shared is mesh.axis("ep").shared
    return [*(mesh.axis(name).shared is not None for name in names), same]


def test_axes_share_where_the_topology_says_so_and_leave_no_file() -> None:
    before = set(Path("/dev/shm").iterdir())
    assert run_ranks(4, axes, True) == [[True, True, True, True, False, True]] * 4
    assert run_ranks(4, axes, False) == [[False, False, False, False, False, True]] * 4
    assert set(Path("/dev/shm").iterdir()) <= before


def without_room() -> bool:
    """Whether there is shared memory for two ranks of which one cannot join."""
    if dist.get_rank() == 1:
        shared_memory._join = lambda path: None
    return SharedMemory.open(dist.group.WORLD) is None


def test_one_rank_that_cannot_share_is_enough_for_sockets() -> None:
    assert run_ranks(2, without_room) == [True, True]


def left_alone() -> str:
    """What a rank says whose partner has ended without a word."""
    shared = SharedMemory.open(dist.group.WORLD)
    assert shared is not None
    shared_memory.LOOK_S = 0.01
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:  # a child that lives on holds no lock of its parent's
            os._exit(0)
        os.waitpid(child, 0)
        shared._file.close()  # what the end of a process does to its locks
        return ""
    part = torch.zeros(4)
    with pytest.raises(dist.DistNetworkError) as caught:
        shared.exchange([part, part], [part, part])
    return str(caught.value)


def test_a_rank_that_has_ended_is_told() -> None:
    assert run_ranks(2, left_alone)[0] == "connection closed: rank 1 of a group has ended"


def waited_in_vain() -> str:
    """What a rank says whose partner is there and does not come."""
    shared = SharedMemory.open(dist.group.WORLD)
    assert shared is not None
    shared_memory.LOOK_S = shared._patience = 0.01
    part, told = torch.zeros(4), ""
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistNetworkError) as caught:
            shared.exchange([part, part], [part, part])
        told = str(caught.value)
    dist.barrier()
    return told


def test_a_rank_that_does_not_come_is_told() -> None:
    assert run_ranks(2, waited_in_vain)[0] == "timed out: waited 0 s for rank 1 of a group"
