"""The peak memory of attention over cp grows linearly in the sequence: twice the tokens, about twice the bytes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_cases import Asked, B, N, Way, grouped, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hp_core.testing.ranks import run_ranks

pytestmark = pytest.mark.distributed


class Peak(TorchDispatchMode):
    """Adds up the bytes of every storage that an operator makes, as long as it lives; ``peak`` is the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak(way: Way, asked: Asked, length: int) -> int:
    """Return the peak of this rank's forward and backward, in bytes."""
    rank = dist.get_rank()
    tensors = [way.local(tensor, rank=rank, dim=2).requires_grad_() for tensor in grouped(length, dtype=torch.float32)]
    ids = asked.ids(length)
    local = None if ids is None else way.local(ids, rank=rank, dim=1)
    context = way.context()
    with Peak() as mode:
        run(context, tensors, asked, local).sum().backward()
    return mode.peak


WAYS = [Way(name="allgather", cp=2), Way(name="ulysses", cp=2), Way(name="ring", cp=2)]
LONG = 4096


def asked(length: int) -> dict[str, Asked]:
    """Return masks that have the same shape at every length."""
    every = tuple(range(0, length, 256))
    return {"causal": Asked(), "window": Asked(window=200), "packed": Asked(starts=(every, every))}


@pytest.mark.parametrize("mask", ["causal", "window", "packed"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_twice_the_tokens_take_about_twice_the_memory(way: Way, mask: str) -> None:
    short, long = (max(run_ranks(2, peak, way, asked(n)[mask], n, timeout=120.0)) for n in (LONG // 2, LONG))
    assert long < 2.2 * short
    assert long < B * N * LONG * LONG * 4 // way.cp // 3  # a third of this rank's scores in fp32
