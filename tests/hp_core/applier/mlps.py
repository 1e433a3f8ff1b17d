"""A component with its layout, a family around it, and members that are wrong in one way each."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

from hp_core.contracts import (
    Init,
    LayoutContext,
    ModuleFamily,
    ModuleInfo,
    ModuleShardingSpec,
    ParallelBinding,
    ParallelModuleSpec,
    Partial,
    Problem,
    Protocol,
    Replicate,
    SelectorSpec,
    Shard,
    VariantRule,
    hookimpl,
)
from hp_core.errors import HPError
from hp_core.plugins.load import plugins_from


@attrs.define
class Config:
    """A configuration as a component reads it."""

    hidden: int = 4
    inner: int = 8
    initializer_range: float = 0.5

    def to_dict(self) -> dict[str, Any]:
        return attrs.asdict(self)


class Mlp(nn.Module):
    """Up cut by columns, down by rows; ``width`` is divided by tp."""

    parallel_spec = ParallelModuleSpec(protocol="test", binding_kind="mesh", validate=f"{__name__}:accept")

    def __init__(self, *, config: Any = None, module: nn.Module | None = None, gain: float = 1.0) -> None:
        super().__init__()
        self.up = module.up if isinstance(module, Source) else nn.Parameter(torch.empty(config.inner, config.hidden))
        self.down = module.down if isinstance(module, Source) else nn.Parameter(torch.empty(config.hidden, config.inner))
        self.register_buffer("scale", torch.empty(1) if module is None else module.scale)
        self.width, self.gain = self.up.shape[0], gain
        self.bound: ParallelBinding | None = None

    def bind_parallel(self, binding: ParallelBinding) -> None:
        self.bound = binding

    def forward(self, x: Tensor) -> Tensor:
        assert self.up.shape[0] == self.width
        return nn.functional.linear(nn.functional.linear(x, self.up), self.down) * self.gain * self.scale


class Source(nn.Module):
    """What a model has in the component's place."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(8, 4, generator=generator))
        self.down = nn.Parameter(torch.randn(4, 8, generator=generator))
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.up), self.down) * self.scale


class Ring(Mlp):
    """A member for cp > 1."""

    parallel_spec = ParallelModuleSpec(protocol="test", binding_kind="cp", validate=f"{__name__}:accept")


class Quiet(nn.Module):
    """A member that says nothing about how it communicates."""

    def __init__(self, *, config: Any) -> None:
        super().__init__()


class Number:
    """No module at all."""

    def __init__(self, *, config: Any) -> None:
        pass


class Fails(nn.Module):
    """Cannot be built."""

    def __init__(self, *, config: Any = None, module: Any = None) -> None:
        raise ValueError("no\n luck")


class Needs(nn.Module):
    """Has an argument without default."""

    def __init__(self, *, config: Any, size: int) -> None:
        super().__init__()


def accept(info: ModuleInfo, spec: ModuleShardingSpec, context: LayoutContext) -> list[Problem]:
    """Nothing is wrong."""
    return []


def layout(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    """Whole in, whole out."""
    return ModuleShardingSpec(
        params={"up": {"tp": Shard(0)}, "down": {"tp": Shard(1)}},
        in_src={"x": {"tp": Replicate()}},
        in_dst={"x": {"tp": Replicate()}},
        out_src={"output": {"tp": Partial()}},
        out_dst={"output": {"tp": Replicate()}},
        local_attrs=("width",),
    )


def path(name: str) -> str:
    """Return the lazy reference of a name of this module."""
    return f"{__name__}:{name}"


INIT = (Init(match="scale", kind="constant", value=2.0), Init(match="*", kind="normal", config_key="initializer_range"))
MLP = ModuleFamily(
    name="mlp",
    baseline=path("Mlp"),
    arguments={"gain": "float"},
    selectors={"fast": SelectorSpec(type="bool", default=False)},
    sharding=path("layout"),
    init=INIT,
)
RING = ModuleFamily(
    name="ring",
    baseline=path("Mlp"),
    variants={"local": path("Ring"), "ring": path("Ring")},
    default_variant="local",
    parallel_axis="cp",
    rules=[VariantRule(when={"parallel": True}, variant="ring")],
    sharding=path("layout"),
    init=INIT,
)


def plugins() -> Any:
    """Return a plugin with the family, two families of one baseline, and two protocols."""
    plugin = types.ModuleType("mlps")

    def hp_families() -> list[ModuleFamily]:
        return [
            MLP,
            attrs.evolve(MLP, name="twin", baseline=path("Ring")),
            attrs.evolve(MLP, name="other", baseline=path("Ring")),
        ]

    def hp_protocols() -> list[Protocol]:
        implementation = path("Number")
        return [
            Protocol(kind="cp", name="allgather", implementation=implementation, other_layouts=["zigzag"]),
            Protocol(kind="cp", name="newer", version=2, implementation=implementation),
        ]

    vars(plugin).update(HP_API=1, hp_families=hookimpl(hp_families), hp_protocols=hookimpl(hp_protocols))
    return plugins_from(plugin)


def refusal(action: Callable[[], Any]) -> str:
    """Return the text of the error that an action raises."""
    with pytest.raises(HPError) as caught:
        action()
    return str(caught.value)
