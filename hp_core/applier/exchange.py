"""FSDP2's collectives over one axis: through the memory that the ranks share, and on gloo by its cheapest collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from hp_core.mesh.context import AxisGroup


def install_exchange(unit: FSDPModule, *, axis: AxisGroup) -> None:
    """Let a unit gather and reduce over ``axis``, on which it is sharded, as below; other backends than gloo keep their own."""
    if dist.get_backend(axis.group) != "gloo":
        return
    unit.set_custom_reduce_scatter(ExchangedReduceScatter(axis))
    if axis.shared is not None:
        unit.set_custom_all_gather(SharedAllGather(axis))


class _OnAxis:
    def __init__(self, axis: AxisGroup) -> None:
        self.axis = axis

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty buffer."""
        return torch.empty(size, dtype=dtype, device=device)


class SharedAllGather(_OnAxis, AllGather):
    """All-gather through shared memory, done when it returns: on CPUs nothing overlaps that would not take a core away."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> dist.Work | None:
        """Fill ``output_tensor`` [ranks * n] with every rank's ``input_tensor`` [n]."""
        self.axis.all_gather(output_tensor, input_tensor)
        return None


class ExchangedReduceScatter(_OnAxis, ReduceScatter):
    """Each rank sends every other its part and adds what arrives, in at least fp32; plain sums only.

    gloo reduces in its own loop, at half the speed of its all-to-all.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Fill ``output_tensor`` [n] with the sum over ranks of this rank's part of ``input_tensor`` [ranks * n]."""
        if op != dist.ReduceOp.SUM:
            return dist.reduce_scatter_single(output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op)
        self.axis.reduce_scatter(output_tensor, input_tensor)
        return None
