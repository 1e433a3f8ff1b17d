"""build_family(): a member on no mesh, on a logical one, and live on two ranks; then in a model whose plan must agree."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_core.applier.apply import apply
from hp_core.applier.family import build_family
from hp_core.contracts import (
    BuiltComponent,
    FamilyContext,
    FamilyRequest,
    Init,
    LayoutContext,
    ModuleFamily,
    ModuleInfo,
    ModuleShardingSpec,
    ParallelBinding,
    ParallelModuleSpec,
    Partial,
    Problem,
    Replicate,
    SelectorSpec,
    Shard,
    VariantRule,
    hookimpl,
)
from hp_core.errors import HPError
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import LogicalDeviceMesh, Topology
from hp_core.models.build import build
from hp_core.models.family import validate_family_context
from hp_core.models.inventory import take_inventory
from hp_core.models.observers import PlanNotRequired, PlanReady
from hp_core.models.state import state_of
from hp_core.planner.plan import plan as make_plan
from hp_core.plugins.load import plugins_from
from hp_core.recipe.overrides import Override
from hp_core.state.full import full_gradients
from hp_core.state.slices import assemble
from hp_core.testing.promote import promote
from hp_core.testing.ranks import run_ranks


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
    plugin = types.ModuleType("mlps")

    def hp_families() -> list[ModuleFamily]:
        return [
            MLP,
            attrs.evolve(MLP, name="twin", baseline=path("Ring")),
            attrs.evolve(MLP, name="other", baseline=path("Ring")),
        ]

    vars(plugin).update(HP_API=1, hp_families=hookimpl(hp_families))
    return plugins_from(plugin)


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(HPError) as caught:
        action()
    return str(caught.value)


def test_without_a_mesh_a_member_is_a_filled_plain_module() -> None:
    events: list[Any] = []
    member = build_family(MLP, arguments={"gain": 3.0}, config=Config(), module_fqn="m.mlp", observers=[events.append])
    assert isinstance(member, Mlp)
    assert events == [PlanNotRequired(reason="the component is built without a mesh")]
    assert 0.3 < member.up.std() < 0.7
    assert torch.equal(member.scale, torch.tensor([2.0]))
    state = state_of(member)
    assert (state.fqn, state.family, state.origin, state.declared_by) == ("m.mlp", "mlp", "direct", "family mlp")
    assert (state.request, state.resolved.arguments) == (FamilyRequest(target="mlp", kwargs={"gain": 3.0}), {"gain": 3.0})
    assert (state.planned, state.built) == (None, None)


def test_the_same_seed_gives_the_same_weights_and_another_one_others() -> None:
    one, same, other = (build_family(MLP, config=Config(), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.up, same.up)
    assert not torch.equal(one.up, other.up)


def test_on_meta_a_member_is_left_to_its_owner() -> None:
    with torch.device("meta"):
        member = build_family(attrs.evolve(MLP, init=()), config=Config())
    assert member.up.is_meta


def test_around_a_module_the_very_parameters_are_kept() -> None:
    source = Source()
    member = build_family(MLP, module=source)
    assert member.up is source.up
    assert torch.equal(member(torch.ones(1, 4)), source(torch.ones(1, 4)))


@pytest.mark.parametrize("target", ["mlp", path("Mlp"), Mlp, FamilyRequest(target="mlp")], ids=str)
def test_a_family_is_found_by_name_baseline_class_or_request(target: Any) -> None:
    member = build_family(target, config=Config(), plugins=plugins())
    assert state_of(member).family == "mlp"
    assert state_of(member).declared_by.startswith("family mlp (")


def test_a_logical_mesh_plans_and_makes_nothing() -> None:
    events: list[Any] = []
    mesh = Topology(tp=2).view("activation")
    member = build_family(MLP, config=Config(), mesh=mesh, observers=[events.append])
    plan = state_of(member).planned
    assert member.up.is_meta
    assert state_of(member).built is None
    assert events == [PlanReady(plan=plan)]
    assert {p.fqn: (p.layout["tp"], p.shape) for p in plan.parameters} == {"up": (Shard(0), (8, 4)), "down": (Shard(1), (4, 8))}
    assert [(c.port, c.forward) for c in plan.boundaries[0].collectives] == [("x", "identity"), ("output", "all_reduce")]


def test_a_deferred_family_is_resolved_by_the_mesh_or_the_context() -> None:
    assert state_of(build_family(RING, config=Config())).resolved.variant == "local"
    built = build_family(RING, config=Config(), context=FamilyContext(cp=2))
    assert state_of(built).resolved.variant == "ring"
    planned = build_family(RING, config=Config(), mesh=Topology(cp=2).view("activation"), context=FamilyContext(cp=2))
    assert state_of(planned).resolved.degrees == {"cp": 2}


REFUSED = [
    (lambda: build_family(MLP), "HP560: family 'mlp': neither config nor module is given; expected exactly one of them"),
    (
        lambda: build_family(MLP, config=Config(), module=Source()),
        "HP560: family 'mlp': config and module are both given; expected exactly one of them",
    ),
    (
        lambda: build_family(attrs.evolve(MLP, arguments={}, baseline=path("Quiet")), module=Source()),
        "HP560: mlp, member baseline, cannot be built from module; expected a member that takes module. family mlp",
    ),
    (
        lambda: build_family(MLP, arguments={"gian": 1}, config=Config()),
        "HP560: family 'mlp' has no argument 'gian'; did you mean 'gain'?; expected fast, gain",
    ),
    (
        lambda: build_family(MLP, arguments={"config": 1}, config=Config()),
        "HP560: family 'mlp' has no argument 'config'; expected fast, gain",
    ),
    (
        lambda: build_family("mpl", config=Config(), plugins=plugins()),
        "HP101: no installed plugin provides the family 'mpl'; did you mean 'mlp'?",
    ),
    (
        lambda: build_family("mlp", config=Config()),
        "HP560: the family 'mlp' is to be looked up, but no plugins are given; expected plugins",
    ),
    (
        lambda: build_family(Quiet, config=Config(), plugins=plugins()),
        f"HP560: families with the baseline {path('Quiet')}: none; expected exactly one",
    ),
    (
        lambda: build_family(Ring, config=Config(), plugins=plugins()),
        f"HP560: families with the baseline {path('Ring')}: several: other, twin; expected exactly one",
    ),
    (
        lambda: build_family(FamilyRequest(target="mlp"), arguments={"gain": 1.0}, config=Config(), plugins=plugins()),
        "HP560: a request for 'mlp' is combined with arguments (gain); expected one of the two",
    ),
    (
        lambda: build_family(MLP, config=Config(), context={"cp": 2}),  # type: ignore[arg-type]
        "HP560: context is a dict; expected a FamilyContext",
    ),
    (
        lambda: build_family(MLP, config=Config(), mesh="tp=2"),  # type: ignore[arg-type]
        "HP560: mesh is a str; expected a MeshContext or a LogicalDeviceMesh",
    ),
    (
        lambda: build_family(RING, config=Config(), mesh=Topology(cp=2).view("dense")),
        "HP560: the mesh (pp, dp_replicate, fsdp, tp) has no axis cp, on which family 'ring' depends; expected a view with cp. "
        "fix: pass topology.view('activation')",
    ),
    (
        lambda: build_family(RING, config=Config(), mesh=LogicalDeviceMesh(("cp",), (4,), Topology(cp=2))),
        "HP560: the mesh has cp=4, its topology cp=2; expected equal degrees",
    ),
    (
        lambda: build_family(MLP, config=Config(), mesh=Topology(cp=2).view("activation"), context=FamilyContext(cp=4)),
        "HP560: the mesh has cp=2 ep=1, the context cp=4 ep=1; expected equal degrees, or no context",
    ),
    (
        lambda: build_family(attrs.evolve(RING, sharding=None), config=Config(), context=FamilyContext(cp=2)),
        "HP560: ring, member ring, for cp=2 has no layout provider; expected one, since the member is parallel",
    ),
    (
        lambda: build_family(attrs.evolve(RING, variants={"local": path("Ring"), "ring": path("Quiet")}), config=Config(),
                             context=FamilyContext(cp=2)),
        "HP560: ring, member ring, for cp=2 has a binding of kind 'none'; expected a parallel_spec of kind 'cp' or 'mesh'",
    ),
    (
        lambda: build_family(attrs.evolve(MLP, sharding=None), config=Config(), mesh=Topology(tp=2).view("activation")),
        "HP560: family 'mlp' has no layout provider; expected one, to be put on a mesh",
    ),
    (
        lambda: build_family(attrs.evolve(MLP, init=INIT[:1]), config=Config()),
        "HP526: nothing initialises the parameter up; expected an entry in init. family mlp",
    ),
    (
        lambda: build_family(ModuleFamily(name="number", baseline=path("Number")), config=Config()),
        "HP560: family 'number' gives a Number; expected a torch module. family number",
    ),
    (
        lambda: build_family(ModuleFamily(name="fails", baseline=path("Fails")), config=Config(), module_fqn="a.b"),
        "HP560: fails cannot be built: ValueError: no luck. a.b",
    ),
    (
        lambda: build_family(ModuleFamily(name="fails", baseline=path("Fails")), module=Source()),
        "HP541: fails cannot replace it: ValueError: no luck. family fails",
    ),
    (
        lambda: build_family(attrs.evolve(MLP, arguments={"size": "int"}), config=Config()),
        f"HP402: family 'mlp': argument 'size' is not in the signature of {path('Mlp')}; expected gain",
    ),
    (
        lambda: build_family(ModuleFamily(name="function", baseline=path("layout")), config=Config()),
        f"HP402: {path('layout')} is function layout; expected a class",
    ),
    (
        lambda: build_family(MLP, config=Config(inner=7), mesh=Topology(tp=2).view("activation")),
        "HP502: .width (7) must be divisible by tp (2). mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("action", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_legal_is_refused_word_for_word(action: Callable[[], Any], text: str) -> None:
    assert refusal(action) == text


class Needs(nn.Module):
    """Has an argument without default."""

    def __init__(self, *, config: Any, size: int) -> None:
        super().__init__()


def test_a_missing_argument_is_named() -> None:
    assert refusal(lambda: build_family(ModuleFamily(name="needs", baseline=path("Needs")), config=Config())) == (
        "HP560: family 'needs' needs the argument 'size'; expected a value"
    )


def test_a_module_built_for_other_degrees_than_the_job_s_is_refused() -> None:
    model = nn.ModuleList(
        [build_family(MLP, config=Config()), build_family(RING, config=Config(), context=FamilyContext(cp=2))]
    )
    validate_family_context(model, FamilyContext(cp=2))
    assert refusal(lambda: validate_family_context(model, FamilyContext(cp=4))) == (
        "HP560: 1 (ring, member ring) was built for cp=2; expected cp=4, the job's. fix: build it with the job's mesh"
    )


def test_a_mesh_of_another_job_is_refused(one_rank: MeshContext) -> None:
    other = attrs.evolve(one_rank, topology=Topology(tp=2))
    assert refusal(lambda: build_family(MLP, config=Config(), mesh=other)) == (
        "HP560: the mesh has 2 ranks, this job has 1; expected a mesh of this job"
    )
    mine = build_family(MLP, config=Config(), mesh=one_rank)
    again = MeshContext.create(Topology())
    assert refusal(lambda: build_family(MLP, module=mine, mesh=again)) == (
        "HP560: the module belongs to another job's mesh; expected a module of this job"
    )


@pytest.fixture
def one_rank() -> MeshContext:
    start_single()
    return MeshContext.create(Topology())


@pytest.mark.distributed
def test_on_two_ranks_a_component_gives_what_one_process_gives() -> None:
    reports = run_ranks(2, live, timeout=120)
    assert reports == [[], []]


def live() -> list[str]:
    """Build on a live mesh, from a configuration and around a module, and in a model; return what is wrong."""
    mesh = MeshContext.create(Topology(tp=2, sequence_parallel=False))
    return [*_from_config(mesh), *_around_a_module(mesh), *_in_a_model(mesh)]


def _compare(name: str, member: nn.Module, alone: nn.Module) -> list[str]:
    x, y = (torch.linspace(-1, 1, 8).view(2, 4).requires_grad_() for _ in range(2))
    got, wanted = member(x), alone(y)
    got.square().sum().backward()
    wanted.square().sum().backward()
    wrong = [] if torch.allclose(got, wanted, atol=1e-5) else [f"{name}: output"]
    wrong += [] if torch.allclose(x.grad, y.grad, atol=1e-4) else [f"{name}: input gradient"]
    for key, parameter in alone.named_parameters():
        mine = member.get_parameter(key)
        wrong += [] if isinstance(mine, DTensor) else [f"{name}: {key} is whole"]
        wrong += [] if torch.allclose(assemble(mine.grad), parameter.grad, atol=1e-3) else [f"{name}: gradient of {key}"]
    return wrong


def _from_config(mesh: MeshContext) -> list[str]:
    member = build_family(MLP, config=Config(), mesh=mesh, seed=3)
    alone = build_family(MLP, config=Config(), seed=3)
    wrong = [] if member.bound.mesh is mesh and member.width == 4 else ["not bound"]
    return wrong + _compare("config", member, alone)


def _around_a_module(mesh: MeshContext) -> list[str]:
    return _compare("module", build_family(MLP, module=Source(), mesh=mesh), Source())


def _in_a_model(mesh: MeshContext) -> list[str]:
    """A model on meta with the component in it: the inventory tells that it is built, and how."""
    member = build_family(MLP, config=Config(), mesh=mesh, module_fqn="inner")
    model = nn.Module()
    model.inner = member
    info = take_inventory(model, config={}).module("inner")
    wrong = [] if isinstance(info.built, BuiltComponent) and info.built.topology == mesh.topology else ["not told as built"]
    wrong += [] if info.attributes["width"] == 8 else ["attributes are the divided ones"]
    wrong += [] if info.parameters["up"].shape == (8, 4) else ["shapes are local ones"]
    return wrong


def _cells() -> types.ModuleType:
    """Return the helper beside this file; test folders are no packages."""
    spec = importlib.util.spec_from_file_location("hp_tests_applier_cells", Path(__file__).with_name("cells.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.distributed
def test_a_component_in_a_model_is_found_by_its_plan_and_trains_like_hugging_face() -> None:
    pytest.importorskip("hp_qwen3_moe")
    assert run_ranks(2, within_a_model, timeout=240) == [[], []]


def within_a_model() -> list[str]:
    """Put experts that were built by themselves into a model on meta; return what differs from Hugging Face, or is not told."""
    cells = _cells()
    with promote():
        recipe = cells.Cell(mesh={"tp": 2}).load()
        mesh = MeshContext.create(recipe.topology(world=2))
        model, inventory = _with_built_experts(recipe, mesh)
        found = make_plan(inventory, recipe, mesh.topology)
        wrong = [] if found.built == (EXPERTS,) else [f"built: {found.built}"]
        before = assemble(model.get_parameter(f"{EXPERTS}.down_proj"))
        apply(model, found, mesh)
        same = torch.equal(before, assemble(model.get_parameter(f"{EXPERTS}.down_proj")))
        wrong += [] if same else ["the weights of the component were touched"]
        cells.set_weights(model, found)
        cells.step(model, mesh)
    return wrong + _gradients_differ(full_gradients(model, found), cells) + _disagreements(inventory, recipe, mesh)


def _with_built_experts(recipe: Any, mesh: MeshContext) -> Any:
    built = build(recipe, mesh=mesh)
    experts = build_family(
        "grouped_experts", config=built.model.config, mesh=mesh, module_fqn=EXPERTS, plugins=recipe.declarations
    )
    built.model.get_submodule("model.layers.1.mlp").experts = experts
    return built.model, take_inventory(built.model, replacements=built.inventory.replacements)


def _gradients_differ(gradients: Any, cells: types.ModuleType) -> list[str]:
    expected = cells.reference({}).gradients
    return [
        name
        for name, wanted in expected.items()
        if (gradients[name] - wanted).abs().max() > 1e-9 * max(1.0, float(wanted.abs().max()))
    ]


def _disagreements(inventory: Any, recipe: Any, mesh: MeshContext) -> list[str]:
    """A plan that wants the component otherwise is refused: by an override, by frozen weights, on another mesh."""
    where = "family grouped_experts (hp-components 0.1.0)"
    fix = "fix: build it the way the model's plan has it, or leave building to the plan"
    override = Override(match=EXPERTS, params={"down_proj": {"cp": Replicate()}})
    cases = [
        (
            attrs.evolve(recipe, overrides=(override,)),
            mesh.topology,
            f"HP561: {EXPERTS} was built by itself with params.down_proj tp=Shard(2); expected tp=Shard(2) cp=Replicate, as "
            f"planned. {where}, changed by recipe. {fix}",
        ),
        (
            attrs.evolve(recipe, freeze=("*.experts.down_proj",)),
            mesh.topology,
            f"HP561: {EXPERTS}.down_proj was built by itself with trainable True; expected False, as planned. {where}. {fix}",
        ),
        (
            recipe,
            Topology(tp=2, dp_shard=2),
            f"HP561: {EXPERTS} was built by itself for the mesh {mesh.topology}; expected {Topology(tp=2, dp_shard=2)}, as "
            f"planned. {where}. {fix}",
        ),
    ]
    found = [(refusal(functools.partial(make_plan, inventory, changed, topology)), text) for changed, topology, text in cases]
    return [text for text, wanted in found if text != wanted]
