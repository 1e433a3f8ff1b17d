"""What a model's ``topk`` calls choose: how clear the choices are, what they are, and choosing the same again.

A comparison of two computations means nothing where rounding decides which expert a token goes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, Tensor.topk)


class WatchRouting(TorchFunctionMode):
    """Records the ``topk`` calls in its block: ``choices``, one int64 tensor per call, and the smallest ``margin``.

    The margin of a row is the distance between the last value chosen and the first left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Tensor] = []
        self.margin = float("inf")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self._record(args[0].detach(), found[1])
        return found

    def _record(self, scores: Tensor, chosen: Tensor) -> None:
        self.choices.append(chosen)
        if chosen.shape[-1] < scores.shape[-1]:
            ordered = scores.sort(dim=-1, descending=True).values
            last, next_one = ordered[..., chosen.shape[-1] - 1], ordered[..., chosen.shape[-1]]
            self.margin = min(self.margin, float((last - next_one).min()))


@contextmanager
def narrow_routing(first: int | None) -> Iterator[None]:
    """Let ``topk`` choose among the ``first`` candidates only, within the block; None leaves them all.

    The functions themselves are replaced: the autograd engine runs without modes, and a recomputed layer must choose alike.
    """

    def narrowed(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda scores, *arguments, **keywords: original(scores[..., :first], *arguments, **keywords)

    with (
        mock.patch.object(torch, "topk", narrowed(torch.topk)),
        mock.patch.object(Tensor, "topk", narrowed(Tensor.topk)),
    ):
        yield


class ForceRouting(TorchFunctionMode):
    """Makes the ``topk`` calls in its block choose ``choices``, in order of the calls, with the call's own scores."""

    def __init__(self, choices: Sequence[Tensor]) -> None:
        super().__init__()
        self._choices = iter(choices)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _TOPK:
            return func(*args, **(kwargs or {}))
        chosen = next(self._choices)
        assert chosen.shape[:-1] == args[0].shape[:-1], (chosen.shape, args[0].shape)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
