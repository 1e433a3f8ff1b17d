"""MeshContext: the live process groups of one job, as views of one world mesh.

The only file that touches DeviceMesh's private parts. Every axis of every view is a size and a stride over the ranks, so
two axes with the same size and stride (fsdp and dp_shard when cp is 1, ep and tp when ep == tp) are one group, and axes
of degree 1 share a single ``fake`` group that costs no communicator.
"""

from __future__ import annotations

import atexit
import math
import time
from collections.abc import Mapping
from typing import Literal

import attrs
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # importing it is what registers the fake backend
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_core.errors import PlanError
from hp_core.mesh.cpu_math import settle_cpu_math
from hp_core.mesh.device import device_module
from hp_core.mesh.shared_memory import SharedMemory
from hp_core.mesh.topology import Topology

settle_cpu_math()  # on import: whatever computes with this package has imported this file before
SHARDED = {"dense": "fsdp", "expert": "efsdp"}
SHARING = ("cp", "tp", "ep", "fsdp", "efsdp")  # the axes over which much travels
_LAST_TENSORS_S = 0.1


@attrs.frozen
class AxisGroup:
    """One axis as a collective sees it: this rank's place, the degree, and the group (None when the degree is 1).

    ``shared``: the memory through which its ranks exchange, None where that goes through the group.
    """

    name: str
    rank: int
    size: int
    group: dist.ProcessGroup | None = attrs.field(default=None, eq=False, repr=False)
    shared: SharedMemory | None = attrs.field(default=None, eq=False, repr=False)

    def all_gather(self, parts: Tensor, x: Tensor) -> None:
        """Fill ``parts`` [degree * n] with every rank's ``x`` [n]; both contiguous, any shape. ``x`` may lie in ``parts``."""
        if self.group is not None and self.shared is None:
            dist.all_gather_single(parts.view(-1), x.view(-1), group=self.group)
            return
        arrived = _by_rank(parts, self.size)
        if arrived[self.rank].data_ptr() != x.data_ptr():
            arrived[self.rank].copy_(x.detach().view(-1))
        if self.shared is not None:
            self.shared.exchange(arrived, [x] * self.size)

    def all_to_all(
        self, arrived: Tensor, sent: Tensor, *, receive: list[int] | None = None, send: list[int] | None = None
    ) -> None:
        """Fill ``arrived`` with what the ranks send here, in their order; both contiguous.

        ``send`` and ``receive`` are rows of dim 0 by rank; None: equal parts.
        """
        if self.group is not None and self.shared is None:
            dist.all_to_all_single(arrived, sent, receive, send, group=self.group)
            return
        into = _by_rank(arrived, self.size) if receive is None else arrived.detach().split(receive)
        out = _by_rank(sent, self.size) if send is None else sent.detach().split(send)
        into[self.rank].view_as(out[self.rank]).copy_(out[self.rank])
        if self.shared is not None:
            self.shared.exchange(into, out)

    def reduce_scatter(self, out: Tensor, sent: Tensor) -> None:
        """Fill ``out`` [n] with the sum of what all ranks have for this one in their ``sent`` [degree * n]; both contiguous.

        Summands are added in the order of ranks, in at least fp32, and rounded once.
        """
        mine = _by_rank(sent, self.size)
        if self.group is None:
            out.view(-1).copy_(mine[0])
            return
        if self.shared is None:
            arrived = torch.empty_like(sent)
            dist.all_to_all_single(arrived.view(-1), sent.view(-1), group=self.group)
            parts = _by_rank(arrived, self.size)
        else:
            parts = tuple(part if rank == self.rank else torch.empty_like(part) for rank, part in enumerate(mine))
            self.shared.exchange(parts, mine)
        out = out.view(-1)
        if len(parts) == 2:  # a single addition is rounded once in every dtype
            torch.add(*parts, out=out)
            return
        total = torch.add(*(part.to(accumulation_dtype(part.dtype)) for part in parts[:2]))
        for part in parts[2:]:
            total.add_(part)
        out.copy_(total)


@attrs.frozen(eq=False)
class MeshContext:
    """The live meshes of one job.

    ``topology`` and ``device`` are public; axes are asked for by name (pp, dp_replicate, dp_shard, cp, tp, ep, fsdp, efsdp).

    Example::

        mesh = MeshContext.create(Topology(tp=2, dp_shard=2))
        mesh.axis("tp").rank, mesh.storage("dense")
    """

    topology: Topology
    device: torch.device
    _meshes: Mapping[str, DeviceMesh] = attrs.field(repr=False)
    _axes: Mapping[str, AxisGroup] = attrs.field(repr=False)
    _storage: Mapping[str, DeviceMesh] = attrs.field(repr=False)
    _spans: dict[tuple[int, int], DeviceMesh] = attrs.field(repr=False)
    _shared: dict[str, SharedMemory | None] = attrs.field(repr=False)

    @classmethod
    def create(cls, topology: Topology, *, device: str = "cpu") -> MeshContext:
        """Return the meshes of ``topology`` over the default process group; every rank must call it.

        HP501 if torch.distributed is not initialised or has another number of ranks.
        """
        if not dist.is_initialized():
            raise PlanError(
                "HP501",
                "torch.distributed is not initialised",
                expected=f"a process group of {topology.world} ranks",
                where=f"mesh: {topology}",
                fix="start the job with torchrun, or call hp_core.mesh.context.start_single() for one process",
            )
        device_module(device)
        topology.check_world(dist.get_world_size())
        meshes, spans = _build_meshes(topology, device=device)
        storage = {view: _storage_mesh(meshes, axis) for view, axis in SHARDED.items()}
        shared: dict[str, SharedMemory | None] = {}
        sharing = SHARING if topology.shared_memory and device == "cpu" else ()
        axes = {name: _axis_group(name, mesh, shared if name in sharing else None) for name, mesh in meshes.items()}
        atexit.unregister(_let_workers_finish)
        if dist.get_world_size() > 1 and dist.get_backend() == "gloo":
            atexit.register(_let_workers_finish)
        return cls(topology, _local_device(device), meshes, axes, storage, spans, shared)

    @property
    def rank(self) -> int:
        """This process's rank in the job."""
        return dist.get_rank()

    def axis(self, name: str) -> AxisGroup:
        """Return the group of an axis; HP503 for another name."""
        self.topology.degree(name)
        return self._axes[name]

    @property
    def tokens(self) -> AxisGroup:
        """The ranks that read different tokens (dp_replicate x dp_shard x cp): sums over a whole batch are taken here."""
        return self._axes["tokens"]

    @property
    def data(self) -> AxisGroup:
        """The ranks that read different batches (dp_replicate x dp_shard): ``rank`` is the part that this rank reads."""
        return self._axes["data"]

    @property
    def over_sockets(self) -> tuple[str, ...]:
        """The axes whose ranks were to share memory and, as this rank knows, cannot."""
        wanted = SHARING if self.topology.shared_memory and self.device.type == "cpu" else ()
        axes = (self._axes[name] for name in wanted)
        gloo = (axis for axis in axes if axis.group is not None and dist.get_backend(axis.group) == "gloo")
        return tuple(axis.name for axis in gloo if axis.shared is None)

    def divide(self, axis: Literal["cp"], sizes: Mapping[str, int]) -> dict[str, AxisGroup]:
        """Return the sub-axes of ``axis`` by name, outer first. All ranks call this, with the same sizes.

        A sub-axis that spans what another axis spans borrows its group; a new one is made once. HP502 if the sizes do not
        multiply to the degree.
        """
        degree, stride = self.topology.degree(axis), self.topology.view("activation").stride(axis)
        if math.prod(sizes.values()) != degree:
            text = f"{' * '.join(f'{name}={size}' for name, size in sizes.items())} is not {axis} ({degree})"
            raise PlanError("HP502", text, expected=f"sizes that multiply to {degree}", where=f"mesh: {self.topology}")
        found, inside = {}, degree
        for name, size in sizes.items():
            inside //= size
            mesh = self._spanning(name, size=size, stride=stride * inside)
            shared = self._shared if self._axes[axis].shared is not None else None
            found[name] = _axis_group(name, mesh, shared)
        return found

    def _spanning(self, name: str, *, size: int, stride: int) -> DeviceMesh:
        key = _span(size, stride)
        like = self._spans.get(key)
        mesh = _axis_mesh(self._meshes["world"], name, size=size, stride=stride, like=like)
        self._spans.setdefault(key, mesh)
        return mesh

    def submesh(self, axis: Literal["tp", "ep"]) -> DeviceMesh:
        """Return the one-axis mesh on which model-parallel parameters are DTensors."""
        self.topology.degree(axis)
        return self._meshes[axis]

    def storage(self, view: Literal["dense", "expert"]) -> DeviceMesh:
        """Return the mesh for ``fully_shard``: (dp_replicate, fsdp or efsdp) when replicated, else one axis."""
        return self._storage[view]


def _by_rank(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """Return the equal parts of a contiguous tensor, flat; it may have no element."""
    return x.detach().view(size, x.numel() // size).unbind(0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are accumulated in: at least fp32 for floating tensors."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _let_workers_finish() -> None:
    """Give gloo's threads a moment to drop the tensors of the last collective, while there is an interpreter.

    They need the GIL for that. A thread that asks for it once the interpreter goes away ends the whole process, after all work
    is done and with "terminate called without an active exception"; nothing tells when a thread has dropped its tensors.
    """
    time.sleep(_LAST_TENSORS_S)


def start_single(device: str = "cpu") -> None:
    """Start a process group of one process, without a port; does nothing when one is already there."""
    if not dist.is_initialized():
        device_module(device)
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _spans(topology: Topology) -> dict[str, tuple[int, int]]:
    """Return (size, stride in ranks) of every axis of every view."""
    views = [topology.view(name) for name in ("activation", "dense", "expert")]
    spans = {axis: (view.size(axis), view.stride(axis)) for view in views for axis in view.names}
    spans["data"] = (topology.data, topology.cp * topology.tp)
    spans["tokens"] = (topology.data * topology.cp, topology.tp)
    return spans


def _span(size: int, stride: int) -> tuple[int, int]:
    """Return what two axes have in common that can share a group."""
    return size, stride if size > 1 else 1


def _build_meshes(topology: Topology, *, device: str) -> tuple[dict[str, DeviceMesh], dict[tuple[int, int], DeviceMesh]]:
    """Return the one-axis mesh of every axis and the first one of every span; equal spans share their groups."""
    world = init_device_mesh(device, (topology.world,), mesh_dim_names=("world",))
    first: dict[tuple[int, int], DeviceMesh] = {}
    meshes: dict[str, DeviceMesh] = {"world": world}
    for name, (size, stride) in _spans(topology).items():
        key = _span(size, stride)
        meshes[name] = _axis_mesh(world, name, size=size, stride=stride, like=first.get(key))
        first.setdefault(key, meshes[name])
    return meshes, first


def _axis_mesh(world: DeviceMesh, name: str, *, size: int, stride: int, like: DeviceMesh | None) -> DeviceMesh:
    """Return a one-axis mesh rooted at ``world``, with the groups of ``like`` or with new ones."""
    mesh = DeviceMesh(
        world.device_type,
        _layout=_MeshLayout.from_sizes_strides((size,), (stride,)),
        _rank_map=world._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=world,
        backend_override=(("fake", None),) if size == 1 else None,
        _init_backend=like is None,
    )
    if like is not None:
        mesh._dim_group_names = like._dim_group_names
    return mesh


def _storage_mesh(meshes: Mapping[str, DeviceMesh], axis: str) -> DeviceMesh:
    replicate = meshes["dp_replicate"]
    return DeviceMesh._concatenate([replicate, meshes[axis]]) if replicate.size() > 1 else meshes[axis]


def _axis_group(name: str, mesh: DeviceMesh, shared: dict[str, SharedMemory | None] | None) -> AxisGroup:
    """Return the axis of a mesh; ``shared``: the memories by group so far, None where this axis goes through its group."""
    if mesh.size() == 1:
        return AxisGroup(name, 0, 1)
    group = mesh.get_group()
    if shared is not None and dist.get_backend(group) == "gloo" and group.group_name not in shared:
        shared[group.group_name] = SharedMemory.open(group)
    memory = None if shared is None else shared.get(group.group_name)
    return AxisGroup(name, mesh.get_local_rank(), mesh.size(), group, memory)


def _local_device(device: str) -> torch.device:
    """Return the device of this process: accelerators by the index that the launcher has made current."""
    if device in ("cpu", "meta"):
        return torch.device(device)
    return torch.device(device, device_module(device).current_device())
