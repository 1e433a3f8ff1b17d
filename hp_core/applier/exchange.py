"""FSDP2's reduce-scatter on gloo: one exchange of the parts and a sum on the spot, which gloo does faster than its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class ExchangedReduceScatter(ReduceScatter):
    """Each rank sends every other its part and adds what arrives, in at least fp32; plain sums on gloo groups only.

    gloo reduces in its own loop, at half the speed of its all-to-all; other backends keep their reduce-scatter.
    """

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty buffer."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Fill ``output_tensor`` [n] with the sum over ranks of this rank's part of ``input_tensor`` [ranks * n]."""
        if op != dist.ReduceOp.SUM or dist.get_backend(group) != "gloo":
            return dist.reduce_scatter_single(output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op)
        arrived = torch.empty_like(input_tensor)
        dist.all_to_all_single(arrived, input_tensor, group=group)
        parts = arrived.view(-1, output_tensor.numel())
        if parts.shape[0] == 2:  # a single addition is rounded once in every dtype
            torch.add(parts[0], parts[1], out=output_tensor)
        else:
            wide = torch.float32 if output_tensor.dtype in (torch.bfloat16, torch.float16) else output_tensor.dtype
            output_tensor.copy_(parts.sum(0, dtype=wide))
        return None
