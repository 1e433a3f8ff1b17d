"""SharedMemory: what the ranks of one host send each other goes through memory that they share, not through sockets.

Each pair of ranks has two slots in a file of /dev/shm, of which one is filled while the other is read, and two counters: parts
written, parts read. A rank writes a part when the one before the last has been read, and reads when it has been written: no
lock, no server, no thread. It needs stores that are seen in the order they are made, as on x86-64. Beside the counter of parts
written stand, for each slot, the bytes of its part and the number of its exchange: ranks that disagree are told.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

FOLDER = Path("/dev/shm")
LARGEST_SLOT, ALL_SLOTS = 2**20, 2**24  # bytes of one slot, and of one slot of every pair
MOST_RANKS = 16  # of more, slots are so small that sockets are faster
LINE = 8  # int64 of a cache line: each counter has its own
SPIN_S, FIRST_NAP_S, LAST_NAP_S, LOOK_S = 2e-4, 5e-5, 1e-3, 1.0


class SharedMemory:
    """The slots between this rank and the others of its group. Its ranks make the same calls in the same order, in one thread.

    Example::

        shared = SharedMemory.open(group)  # None where it cannot be: other hosts, another processor, no room
        shared.exchange(arrived, sent)  # arrived[r] becomes what rank r has sent here
    """

    def __init__(self, file: BinaryIO, *, rank: int, size: int, patience: float) -> None:
        self._file = file  # closed with this object
        self._rank, self._size, self._patience = rank, size, patience
        self._peers = [(rank + step) % size for step in range(1, size)]
        self._memory = mmap.mmap(file.fileno(), _bytes(size))
        fcntl.lockf(file, fcntl.LOCK_EX, 1, rank)  # let go of when this process ends, however it ends
        self._counters = memoryview(self._memory).cast("q")
        with torch.inference_mode(mode=False):
            slots = torch.frombuffer(self._memory, dtype=torch.uint8, offset=_counter_bytes(size))
            self._slots = slots.view(size, size, 2, _slot_bytes(size))  # from, to, turn
        self._written, self._read, self._number = [0] * size, [0] * size, 0
        crowded = dist.get_world_size() > len(os.sched_getaffinity(0))
        self._spin = 0.0 if crowded else SPIN_S  # where another rank needs the core, a rank that waits leaves it at once
        self._whole = True

    @classmethod
    def open(cls, group: dist.ProcessGroup) -> SharedMemory | None:
        """Return the memory of this rank's group, or None on all its ranks if one of them cannot share; all call this."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        file = _create(size) if rank == 0 and size <= MOST_RANKS and _ordered() else None
        path = file.name if file is not None else None
        try:
            offered: list[str | None] = [path]
            dist.broadcast_object_list(offered, group=group, group_src=0)
            if rank != 0 and offered[0] is not None and _ordered():
                file = _join(offered[0])
            shared = None
            if file is not None:
                patience = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
                with suppress(OSError):  # too many files, no address space
                    shared = cls(file, rank=rank, size=size, patience=patience)
            found: list[bool] = [False] * size
            dist.all_gather_object(found, shared is not None, group=group)
        finally:
            if path is not None:
                os.unlink(path)
        return shared if all(found) else None

    @torch.no_grad()
    def exchange(self, arrived: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Fill ``arrived[r]`` with what rank r sends here, and send it ``sent[r]``; contiguous, of one dtype on both sides.

        What this rank would send itself is left to the caller.
        Raises:
            DistNetworkError: another rank of the group has ended, or has not come for as long as the group waits.
            DistError: the ranks disagree about what is sent; or an exchange was left before its end, and none can follow.
        """
        if not self._whole:
            raise dist.DistError("an exchange of this group was left before its end, or has not ended in another thread")
        self._whole, self._number = False, self._number + 1
        incoming, outgoing = [_as_bytes(x) for x in arrived], [_as_bytes(x) for x in sent]
        longest = max(max(incoming[peer].numel(), outgoing[peer].numel()) for peer in self._peers)
        slot = self._slots.shape[-1]
        for start in range(0, longest, slot):
            for peer in self._peers:
                self._write(peer, outgoing[peer][start : start + slot])
            for peer in self._peers:
                self._take(peer, incoming[peer][start : start + slot])
        self._whole = True

    def _write(self, peer: int, part: Tensor) -> None:
        if part.numel() == 0:
            return
        count, place = self._written[peer], self._counter(self._rank, peer, 0)
        self._wait(self._counter(self._rank, peer, 1), count - 1, peer)
        self._slots[self._rank, peer, count % 2, : part.numel()].copy_(part)
        label = place + 1 + 2 * (count % 2)
        self._counters[label], self._counters[label + 1] = part.numel(), self._number
        self._counters[place] = self._written[peer] = count + 1

    def _take(self, peer: int, part: Tensor) -> None:
        if part.numel() == 0:
            return
        count, place = self._read[peer], self._counter(peer, self._rank, 0)
        self._wait(place, count + 1, peer)
        label = place + 1 + 2 * (count % 2)
        found, expected = (self._counters[label], self._counters[label + 1]), (part.numel(), self._number)
        if found != expected:
            what = f"rank {peer} of a group sent {found[0]} bytes in its exchange {found[1]}"
            raise dist.DistError(f"{what}, this one expected {expected[0]} in exchange {expected[1]}")
        part.copy_(self._slots[peer, self._rank, count % 2, : part.numel()])
        self._counters[self._counter(peer, self._rank, 1)] = self._read[peer] = count + 1

    def _counter(self, source: int, target: int, which: int) -> int:
        """Return the place of the number of parts from ``source`` to ``target`` that were written (0) or read (1)."""
        return ((source * self._size + target) * 2 + which) * LINE

    def _wait(self, place: int, count: int, peer: int) -> None:
        counters = self._counters
        if counters[place] >= count:
            return
        start = looked = time.monotonic()
        nap = FIRST_NAP_S
        while counters[place] < count:
            now = time.monotonic()
            if now - start < self._spin:
                os.sched_yield()
                continue
            time.sleep(nap)
            nap = min(2 * nap, LAST_NAP_S)  # a rank that waits long would keep a core from those it waits for
            if now - looked > LOOK_S:
                looked = now
                self._check(peer, waited=now - start, done=lambda: counters[place] >= count)

    def _check(self, peer: int, *, waited: float, done: Callable[[], bool]) -> None:
        """Raise DistNetworkError if ``peer`` has ended or lets wait too long."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, peer)
        except OSError:
            if waited > self._patience:
                raise dist.DistNetworkError(f"timed out: waited {waited:.0f} s for rank {peer} of a group") from None
            return
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, peer)
        if not done():
            raise dist.DistNetworkError(f"connection closed: rank {peer} of a group has ended")


def _ordered() -> bool:
    """Return whether this machine shows other processes its stores in their order."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and FOLDER.is_dir()


def _create(size: int) -> BinaryIO | None:
    """Return a file whose memory is set aside, or None where there is no room for it."""
    try:
        number, path = tempfile.mkstemp(prefix="hp-", dir=FOLDER)
        os.close(number)
    except OSError:
        return None
    file = _join(path)
    try:
        if file is not None:
            os.posix_fallocate(file.fileno(), 0, _bytes(size))
            return file
    except OSError:
        pass
    os.unlink(path)
    return None


def _join(path: str) -> BinaryIO | None:
    try:
        return open(path, "rb+", buffering=0)
    except OSError:
        return None  # another host, or another container of this one


def _slot_bytes(size: int) -> int:
    return min(LARGEST_SLOT, ALL_SLOTS // size**2) // 64 * 64


def _counter_bytes(size: int) -> int:
    return size**2 * 2 * LINE * 8


def _bytes(size: int) -> int:
    return _counter_bytes(size) + 2 * size**2 * _slot_bytes(size)


def _as_bytes(x: Tensor) -> Tensor:
    return x.detach().view(-1).view(torch.uint8)
