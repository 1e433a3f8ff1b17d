"""The owned slice is exactly what torch's own sharding leaves on a rank, and assembling gives the tensor back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.state.slices import assemble, assign, owned_slice
from hp_core.testing.ranks import run_ranks

# sizes: dim 0 even and uneven over the storage axis, fewer rows than ranks, and a dim 1 to be cut by tp
SHAPES = {"even": (8, 4), "uneven": (6, 4), "tiny": (2, 4), "row": (10, 8), "vector": (6,)}
SHARDED = {"plain": {}, "four": {"even": 1, "row": 1}, "tp": {"even": 0, "uneven": 0, "tiny": 0, "row": 1}}


class Holder(nn.Module):
    """Parameters of :data:`SHAPES`, on meta."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))

    def forward(self, x):
        return sum((local(parameter).sum() for parameter in self.parameters()), x)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def full(name: str) -> torch.Tensor:
    """A tensor of different numbers."""
    return torch.arange(torch.Size(SHAPES[name]).numel(), dtype=torch.float32).reshape(SHAPES[name])


def check_ranks(cases: list[tuple[str, Topology, str, bool]]) -> list[str]:
    """Run several cases in one job and return what does not fit."""
    return [f"{name}: {line}" for name, *case in cases for line in check_case(*case)]


def check_case(topology: Topology, kind: str, fsdp: bool) -> list[str]:
    """Shard a model as the applier does, fill it, and return what does not fit."""
    mesh = MeshContext.create(topology)
    model = Holder()
    for name, dim in SHARDED[kind].items():
        sharded = distribute_tensor(getattr(model, name).data, mesh.submesh("tp"), [Shard(dim)], src_data_rank=None)
        model.register_parameter(name, nn.Parameter(sharded))
    if fsdp:
        fully_shard(model, mesh=mesh.storage("dense"), reshard_after_forward=True)
    model.to_empty(device="cpu")
    wrong = [f"{name}: {line}" for name, parameter in model.named_parameters() for line in problems(name, parameter)]
    if fsdp:  # FSDP2 pads and moves the local tensors on first use: what was assigned must survive it
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        model(torch.zeros(())).backward()
        wrong += [f"{n}: lost" for n, p in model.named_parameters() if not torch.equal(assemble(p), full(n))]
        ones = topology.data * torch.ones(())
        wrong += [
            f"{n}: gradient" for n, p in model.named_parameters() if not torch.equal(assemble(p.grad), ones.expand_as(full(n)))
        ]
    return wrong


def problems(name: str, parameter: nn.Parameter) -> list[str]:
    """Assign and assemble one parameter and compare with torch's own distribution where it has one."""
    assign(parameter, full(name))
    found = []
    if not torch.equal(owned_slice(parameter, full(name)), local(parameter)):
        found.append(f"slice {owned_slice(parameter, full(name)).shape} for {local(parameter).shape}")
    if not torch.equal(assemble(parameter), parameter.full_tensor() if isinstance(parameter, DTensor) else parameter):
        found.append("torch assembles it differently")
    if not torch.equal(assemble(parameter), full(name)):
        found.append(f"assembled {assemble(parameter).tolist()}")
    if assemble(parameter).requires_grad or parameter.grad is not None:
        found.append("took part in autograd")
    return found


CASES = [
    ("one rank, plain", Topology(), "plain", False),
    ("one rank, FSDP2 and tp of degree 1", Topology(), "tp", True),
    ("tp only", Topology(tp=2), "tp", False),
    ("fsdp over one rank, tp", Topology(tp=2), "tp", True),
    ("fsdp", Topology(dp_shard=2), "plain", True),
    ("replicated only", Topology(dp_replicate=2), "plain", True),
    ("fsdp over four", Topology(dp_shard=4), "plain", True),
    ("tp over four", Topology(tp=4), "four", False),
    ("fsdp and tp", Topology(dp_shard=2, tp=2), "tp", True),
    ("hsdp", Topology(dp_replicate=2, dp_shard=2), "plain", True),
    ("replicated and tp", Topology(dp_replicate=2, tp=2), "tp", True),
]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 4])
def test_assigning_and_assembling_are_exact_on_every_mesh_of(world):
    cases = [case for case in CASES if case[1].world == world]
    assert run_ranks(world, check_ranks, cases) == [[]] * world


def test_a_plain_tensor_is_owned_whole_and_assembled_without_a_copy():
    parameter = nn.Parameter(torch.zeros(3, 2))
    assign(parameter, torch.ones(3, 2, dtype=torch.float64))
    assert torch.equal(parameter, torch.ones(3, 2))
    assert assemble(parameter).data_ptr() == parameter.data_ptr()
