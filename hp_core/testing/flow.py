"""Which value reaches which port when a model really runs: what an adapter's ``flow`` is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hp_core.contracts.inventory import Inventory
from hp_core.contracts.sharding import ModuleShardingSpec

Edge = tuple[str, str]
_ADD = ("add", "__add__")


def trace_flow(model: nn.Module, inventory: Inventory, specs: Mapping[str, ModuleShardingSpec]) -> list[Edge]:
    """Run ``model`` (on meta; it gets memory and random parameters) once; return (producer, consumer) of every value used.

    Ports are named as in a flow: ``"FQN:argument or output"``, ``"@input"`` for the model's own inputs, ``"@residual"`` for
    sums made outside every boundary. ``specs``: the declared boundaries by FQN.
    """
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.normal_(std=0.02)
    return _Tracer(model, inventory, specs).run()


class _Tracer(TorchFunctionMode):
    """Names values by their storage, so views keep their name."""

    def __init__(self, model: nn.Module, inventory: Inventory, specs: Mapping[str, ModuleShardingSpec]) -> None:
        super().__init__()
        self.model, self.inventory, self.specs = model, inventory, specs
        self.names: dict[int, str] = {}
        self.alive: list[Tensor] = []
        self.edges: list[Edge] = []
        self.depth = 0

    def run(self) -> list[Edge]:
        handles = []
        for fqn in self.specs:
            module = self.model.get_submodule(fqn)
            handles.append(module.register_forward_pre_hook(self._enter(fqn), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(fqn), with_kwargs=True))
        ids, positions = torch.zeros((2, 8), dtype=torch.int64), torch.arange(8)[None].repeat(2, 1)
        for value in (ids, positions):
            self._name(value, "@input")
        with self, torch.no_grad():
            self.model(input_ids=ids, position_ids=positions)
        for handle in handles:
            handle.remove()
        return self.edges

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.depth == 0 and getattr(func, "__name__", "") in _ADD:
            self.edges += [(name, "@residual") for name in map(self._name_of, args) if name not in (None, "@residual")]
            self._name(result, "@residual")
        return result

    def _enter(self, fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.depth += 1
            bound = {**dict(zip(self.inventory.module(fqn).forward_args, args, strict=False)), **kwargs}
            for port in self.specs[fqn].in_src:
                values = bound[port] if isinstance(bound[port], tuple) else (bound[port],)
                self.edges += [(self._name_of(value) or "?", f"{fqn}:{port}") for value in values]

        return hook

    def _leave(self, fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.depth -= 1
            values = output if isinstance(output, tuple) else (output,)
            for name, value in zip(self.specs[fqn].out_names, values, strict=True):
                if name is not None:
                    self._name(value, f"{fqn}:{name}")

        return hook

    def _name(self, value: Tensor, name: str) -> None:
        self.alive.append(value)
        self.names[value.untyped_storage().data_ptr()] = name

    def _name_of(self, value: Any) -> str | None:
        return self.names.get(value.untyped_storage().data_ptr()) if isinstance(value, Tensor) else None
