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


def disagreeing() -> tuple[str, str]:
    """What ranks say that gather different sizes, and that go on after that."""
    shared = SharedMemory.open(dist.group.WORLD)
    assert shared is not None
    x = torch.zeros(4 * (1 + dist.get_rank()))
    told = []
    for _ in range(2):
        with pytest.raises(dist.DistError) as caught:
            shared.exchange([torch.empty_like(x)] * 2, [x] * 2)
        told.append(str(caught.value))
    dist.barrier()
    return told[0], told[1]


def test_ranks_that_disagree_about_sizes_are_told_and_cannot_go_on() -> None:
    first, second = run_ranks(2, disagreeing)
    assert first[0] == "rank 1 of a group sent 32 bytes in its exchange 1, this one expected 16 in exchange 1"
    assert second[0] == "rank 0 of a group sent 16 bytes in its exchange 1, this one expected 32 in exchange 1"
    left = "an exchange of this group was left before its end, or has not ended in another thread"
    assert (first[1], second[1]) == (left, left)


def with_gradients() -> Tensor:
    """A gather of a parameter in a mesh that was made under inference mode."""
    with torch.inference_mode():
        axis = MeshContext.create(Topology(dp_shard=2)).axis("fsdp")
    parts = torch.empty(2, 3)
    axis.all_gather(parts, torch.full((3,), float(axis.rank), requires_grad=True))
    return parts


def test_parameters_travel_from_any_grad_mode() -> None:
    for parts in run_ranks(2, with_gradients):
        assert parts.tolist() == [[0.0] * 3, [1.0] * 3]


def test_a_single_rank_exchanges_with_itself() -> None:
    axis, x, found = AxisGroup("tp", 0, 1), torch.arange(4.0), [torch.empty(4) for _ in range(3)]
    axis.all_gather(found[0], x)
    axis.all_to_all(found[1], x)
    axis.reduce_scatter(found[2], x)
    assert all(torch.equal(one, x) for one in found)


def unable(rank: int) -> tuple[bool, int]:
    """Whether memory is shared when one rank cannot map it, and how many files are left."""
    if dist.get_rank() == rank:
        shared_memory.mmap.mmap = refuse  # type: ignore[assignment]
    shared = SharedMemory.open(dist.group.WORLD)
    dist.barrier()
    return shared is None, len(list(Path("/dev/shm").glob("hp-*")))


def refuse(*_: object) -> None:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_leaves_all_to_sockets_and_no_file(rank: int) -> None:
    left = len(list(Path("/dev/shm").glob("hp-*")))
    for none, files in run_ranks(2, unable, rank):
        assert none
        assert files <= left


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
