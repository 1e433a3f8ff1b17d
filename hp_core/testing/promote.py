"""promote(): run code that asks for float32 in float64, so that an exact comparison sees no rounding of a few operations.

Hugging Face computes norms, softmaxes and routers in float32 even in a float64 model, which costs 1e-7; without that the
same mathematics done twice agrees to 1e-15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode


@contextmanager
def promote() -> Iterator[None]:
    """Within the block, float32 means float64: ``.float()``, ``.to(torch.float32)``, ``dtype=`` and new tensors.

    Tensors that exist already keep their dtype; operators called as ``torch.ops`` are left alone. What a backward computes
    again is promoted too.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    mode, recomputing = _Promote(), _Recomputing()
    handles = (
        register_module_forward_pre_hook(recomputing.enter),
        register_module_forward_hook(recomputing.leave, always_call=True),
    )
    try:
        with mode:
            yield
    finally:
        torch.set_default_dtype(before)
        for handle in handles:
            handle.remove()


class _Promote(TorchFunctionMode):
    """Replaces the dtype float32 among the arguments of every torch function."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].to(torch.float64, **(kwargs or {}))
        return func(*map(_promoted, args), **{name: _promoted(value) for name, value in (kwargs or {}).items()})


class _Recomputing:
    """Brings the mode into the backward: the autograd engine runs without it, and what it recomputes are module calls."""

    def __init__(self) -> None:
        self._entered: list[tuple[nn.Module, _Promote]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        """Start the mode where it is off."""
        if torch.empty(0, dtype=torch.float32).dtype != torch.float64:
            mode = _Promote()
            mode.__enter__()
            self._entered.append((module, mode))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the mode with the call that started it."""
        if self._entered and self._entered[-1][0] is module:
            self._entered.pop()[1].__exit__(None, None, None)


def _promoted(value: Any) -> Any:
    """Return ``value``, or float64 where it names float32."""
    if isinstance(value, torch.dtype):
        return torch.float64 if value is torch.float32 else value
    return "torch.DoubleTensor" if isinstance(value, str) and value == "torch.FloatTensor" else value
