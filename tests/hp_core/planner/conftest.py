"""A toy model that needs no torch: an embedding, two layers (norm, mlp), a head. Every test changes one thing of it.

Sizes: vocabulary 32, hidden 8, intermediate 16; they differ so that a dim taken for another shows.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from hp_core.contracts import (
    BuildPlan,
    FlowRule,
    Init,
    Inventory,
    Kernel,
    LayoutContext,
    LayoutRule,
    ModelAdapter,
    ModuleFamily,
    ModuleInfo,
    ModuleShardingSpec,
    Partial,
    Port,
    PrecisionScheme,
    Problem,
    Protocol,
    Replacement,
    ReplacementPlan,
    Replicate,
    Shard,
    Stack,
    TensorInfo,
    Unflatten,
    hookimpl,
)
from hp_core.mesh.topology import Topology
from hp_core.planner.plan import plan
from hp_core.plugins.load import plugins_from
from hp_core.recipe.load import recipe_from_dict
from hp_core.recipe.schema import Recipe

RULES = (
    LayoutRule(name="embed", module_class="Embedding", match="embed", provider="toy_layouts:embed"),
    LayoutRule(name="norm", module_class="toy:Norm", match="layers.*.norm", provider="toy_layouts:norm"),
    LayoutRule(name="mlp", module_class="Mlp", match="layers.*.mlp", provider="toy_layouts:mlp"),
    LayoutRule(name="head", module_class="Linear", match="head", provider="toy_layouts:head"),
)
FLOW = (
    FlowRule(producer="@input", consumer="embed:ids"),
    FlowRule(producer="embed:output", consumer="@residual"),
    FlowRule(producer="@residual", consumer="layers.{i}.norm:x"),
    FlowRule(producer="layers.{i}.norm:output", consumer="layers.{i}.mlp:x"),
    FlowRule(producer="layers.{i}.mlp:output", consumer="@residual"),
    FlowRule(producer="@residual", consumer="head:x"),
    FlowRule(producer="head:output", consumer="@output"),
)
ADAPTER = ModelAdapter(
    name="toy",
    model_class="toy:Model",
    config_class="toy:Config",
    layout=RULES,
    counts="toy_layouts:counts",
    residual="toy_layouts:residual",
    flow=FLOW,
    replacements=(Replacement(match="embed", implementation="table", source_type="Embedding"),),
    loss="head",
    init=(Init(match="*norm.weight", kind="constant", value=1.0), Init(match="*", kind="normal", value=0.02)),
    stack=Stack(layers="layers", before=("embed",), after=("head",)),
)
TABLE = ModuleFamily(
    name="table", baseline="toy:Table", sharding="toy_layouts:embed", transforms={"weight": (Unflatten(0, (-1,)),)}
)


def embed(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    return ModuleShardingSpec(
        params={"weight": {"tp": Shard(0)}},
        in_src={"ids": ctx.inside(dim=1)},
        out_src={"output": ctx.inside(dim=1, tp=Partial())},
        out_dst={"output": ctx.residual},
        ports={"ids": Port(shape=("B", "S"), dtype="int64"), "output": ctx.hidden()},
    )


def norm(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    return ModuleShardingSpec(
        params={"weight": {"tp": Replicate()}},
        in_src={"x": ctx.residual},
        out_src={"output": ctx.residual},
        ports={"x": ctx.hidden()},
    )


def mlp(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    return ModuleShardingSpec(
        params={"up.weight": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}},
        in_src={"x": ctx.residual},
        in_dst={"x": ctx.inside(dim=1)},
        out_src={"output": ctx.inside(dim=1, tp=Partial())},
        out_dst={"output": ctx.residual},
        ports={"x": ctx.hidden(), "output": ctx.hidden()},
        each_token=True,
    )


def head(info: ModuleInfo, ctx: LayoutContext) -> ModuleShardingSpec:
    return ModuleShardingSpec(
        params={"weight": {"tp": Shard(0)}},
        in_src={"x": ctx.residual},
        in_dst={"x": ctx.inside(dim=1)},
        out_src={"output": ctx.inside(dim=1)},
        ports={"x": ctx.hidden()},
    )


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The importable module of the toy's providers; a test replaces one with ``layouts.norm = ...``."""
    module = types.ModuleType("toy_layouts")
    vars(module).update(
        embed=embed,
        norm=norm,
        mlp=mlp,
        head=head,
        counts=lambda config: {"embed": 1, "norm": 2, "mlp": 2, "head": 1},
        residual=lambda ctx: ctx.residual,
    )
    monkeypatch.setitem(sys.modules, "toy_layouts", module)
    return module


def tensor(*shape: int, dtype: str = "float32", trainable: bool = True) -> TensorInfo:
    return TensorInfo(shape=shape, dtype=dtype, trainable=trainable)


def module(fqn: str, cls: str, **fields: Any) -> ModuleInfo:
    return ModuleInfo(fqn=fqn, cls=f"toy:{cls}", **fields)


def layer(index: int) -> list[ModuleInfo]:
    name = f"layers.{index}"
    return [
        module(name, "Layer"),
        module(f"{name}.norm", "Norm", forward_args=("x",), parameters={"weight": tensor(8)}),
        module(f"{name}.mlp", "Mlp", forward_args=("x",), attributes={"width": 16}),
        module(f"{name}.mlp.up", "Linear", parameters={"weight": tensor(16, 8)}),
        module(f"{name}.mlp.down", "Linear", parameters={"weight": tensor(8, 16)}),
    ]


def make_inventory() -> Inventory:
    return Inventory(
        model_class="toy:Model",
        config={"hidden_size": 8},
        modules=[
            module("", "Model"),
            module("embed", "Table", family="table", forward_args=("ids",), parameters={"weight": tensor(32, 8)}),
            module("layers", "ModuleList"),
            *layer(0),
            *layer(1),
            module("head", "Linear", forward_args=("x",), parameters={"weight": tensor(32, 8)}),
        ],
        replacements=[
            ReplacementPlan(
                fqn="embed", source="toy:Embedding", family="table", constructor="toy:Table", declared_by="adapter toy"
            )
        ],
    )


def with_module(inventory: Inventory, fqn: str, **changes: Any) -> Inventory:
    """Return the inventory with fields of one module changed."""
    modules = [attrs.evolve(info, **changes) if info.fqn == fqn else info for info in inventory.modules]
    return attrs.evolve(inventory, modules=modules)


Plan = Callable[..., BuildPlan]


@pytest.fixture
def make_recipe(layouts: types.ModuleType) -> Callable[..., Recipe]:
    """Return a function that makes a recipe for the toy: an adapter, recipe keys, what hp_check_plan says, schemes."""

    def make(
        keys: Mapping[str, Any] | None = None,
        *,
        adapter: ModelAdapter = ADAPTER,
        problems: tuple[Problem, ...] = (),
        schemes: tuple[PrecisionScheme, ...] = (),
        kernels: tuple[Kernel, ...] = (),
        family: ModuleFamily = TABLE,
        protocols: tuple[Protocol, ...] = (),
    ) -> Recipe:
        plugin = types.ModuleType("toy")
        vars(plugin).update(
            HP_API=1,
            hp_adapters=hookimpl(named("hp_adapters", [adapter])),
            hp_families=hookimpl(named("hp_families", [family])),
            hp_kernels=hookimpl(named("hp_kernels", list(kernels))),
            hp_protocols=hookimpl(named("hp_protocols", list(protocols))),
            hp_schemes=hookimpl(named("hp_schemes", list(schemes))),
        )

        def hp_check_plan(plan: BuildPlan) -> list[Problem]:
            return list(problems)

        vars(plugin)["hp_check_plan"] = hookimpl(hp_check_plan)
        data = {"model": {"adapter": "toy", "config": {"hidden_size": 8}}, **(keys or {})}
        return recipe_from_dict(data, plugins=plugins_from(plugin))

    return make


def named(name: str, value: Any) -> Callable[[], Any]:
    def hook() -> Any:
        return value

    hook.__name__ = name
    return hook


@pytest.fixture
def make_plan(make_recipe: Callable[..., Recipe]) -> Plan:
    """Return a function that plans the toy: on a mesh, with another inventory, adapter or recipe keys."""

    def make(
        topology: Topology | None = None,
        *,
        inventory: Inventory | None = None,
        adapter: ModelAdapter = ADAPTER,
        keys: Mapping[str, Any] | None = None,
        problems: tuple[Problem, ...] = (),
        schemes: tuple[PrecisionScheme, ...] = (),
        kernels: tuple[Kernel, ...] = (),
        family: ModuleFamily = TABLE,
        protocols: tuple[Protocol, ...] = (),
    ) -> BuildPlan:
        recipe = make_recipe(
            keys,
            adapter=adapter,
            problems=problems,
            schemes=schemes,
            kernels=kernels,
            family=family,
            protocols=protocols,
        )
        return plan(inventory or make_inventory(), recipe, topology or Topology(tp=2))

    return make


@pytest.fixture
def toy() -> types.SimpleNamespace:
    """The toy's parts and the helpers that change them, for tests (a conftest cannot be imported)."""
    return types.SimpleNamespace(
        ADAPTER=ADAPTER,
        FLOW=FLOW,
        RULES=RULES,
        TABLE=TABLE,
        inventory=make_inventory(),
        module=module,
        tensor=tensor,
        with_module=with_module,
    )
