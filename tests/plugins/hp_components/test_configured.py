"""Components built from a configuration against Hugging Face and torch: one process, two ranks, on meta, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from configured_cases import CASES, FAMILIES, Case, differentiable, gradients, load, outputs_of, upstream
from torch import Tensor, nn

from hp_components.reference.swiglu import swiglu
from hp_core.applier.collectives import all_gather
from hp_core.applier.family import build_family
from hp_core.contracts import Shard
from hp_core.mesh.context import MeshContext
from hp_core.mesh.topology import Topology
from hp_core.models.state import state_of, update
from hp_core.planner.families import decision_table
from hp_core.state.full import full_gradients
from hp_core.testing.promote import promote
from hp_core.testing.ranks import run_ranks

Outcome = tuple[list[Tensor], dict[str, Tensor]]  # outputs, and gradients of inputs and parameters


def reference(case: Case) -> Outcome:
    with promote():
        theirs = load(case.reference(case.config()).double(), case)
        return computed(theirs, case, **case.more())


def computed(module: nn.Module, case: Case, call: Callable[..., Any] | None = None, **more: Any) -> Outcome:
    """Return what a whole module computes: outputs, gradients of inputs and of parameters."""
    inputs = differentiable(case.inputs())
    outputs = outputs_of((module if call is None else call)(**inputs, **more))
    total = sum((out * upstream(place, out)).sum() for place, out in enumerate(outputs) if out.is_floating_point())
    assert isinstance(total, Tensor)
    total.backward()
    found = {name: item.grad for name, item in inputs.items() if isinstance(item, Tensor) and item.grad is not None}
    return [out.detach() for out in outputs], found | gradients(module, case)


def made(case: Case, **options: Any) -> nn.Module:
    config = case.config()
    config.dtype = torch.float64
    return load(build_family(FAMILIES[case.family], arguments=case.arguments, config=config, **options), case)


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert found[1].keys() == expected[1].keys()
    names = [*map(str, range(len(expected[0]))), *expected[1]]
    pairs = zip(names, [*found[0], *found[1].values()], [*expected[0], *(expected[1][n] for n in found[1])], strict=True)
    errors = {}
    for name, one, other in pairs:
        assert one.shape == other.shape, name
        errors[name] = float((one.double() - other.double()).abs().max()) / (float(other.double().abs().max()) or 1.0)
    assert max(errors.values()) <= 1e-9, errors


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_references(name: str) -> None:
    case = CASES[name]
    ours = made(case)
    with promote():
        found = computed(ours, case)
    assert_equal(found, reference(case))


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith(("loop", "batched"))])
def test_on_meta_it_has_the_references_elements_and_runs(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        ours = build_family(FAMILIES[case.family], arguments=case.arguments, config=case.config())
        theirs = case.reference(case.config())
        inputs = {
            key: tuple(part.to("meta", torch.float32) for part in item) if isinstance(item, tuple) else item.to("meta")
            for key, item in case.inputs().items()
        }
        floating = {key: item.float() for key, item in inputs.items() if isinstance(item, Tensor) and item.is_floating_point()}
        if case.family == "grouped_experts":  # torch's own kernels, fused, read row counts where there are any
            update(ours, "", kernels={"swiglu": swiglu})
        outputs = outputs_of(ours(**{**inputs, **floating}))
    assert all(tensor.is_meta for tensor in (*ours.parameters(), *ours.buffers(), *outputs))
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch._dynamo's own
@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("window")])
def test_it_compiles(name: str) -> None:
    """In one graph, but where row counts are read on the host. A window makes masks as it runs, which dynamo cannot trace."""
    case, whole = CASES[name], not name.endswith(("loop", "batched"))
    ours = made(case)
    expected = computed(ours, case)
    ours.zero_grad()
    torch._dynamo.reset()
    assert_equal(computed(ours, case, torch.compile(ours, backend="aot_eager", fullgraph=whole)), expected)


def on_two_ranks(sequence_parallel: bool) -> dict[str, Outcome]:
    """Return what every component computes on tp=2: outputs and input gradients whole, gradients whole."""
    mesh = MeshContext.create(Topology(tp=2, sequence_parallel=sequence_parallel))
    return {name: on_the_mesh(case, mesh) for name, case in CASES.items()}


def on_the_mesh(case: Case, mesh: MeshContext) -> Outcome:
    ours = made(case, mesh=mesh)
    state = state_of(ours)
    assert state is not None
    assert state.planned is not None
    spec = state.planned.boundaries[0].spec
    dims = {name: cut(layout) for name, layout in spec.in_src.items()}
    inputs = differentiable({name: local(item, dims.get(name), mesh) for name, item in case.inputs().items()})
    with promote():
        outputs = outputs_of(ours(**inputs))
        layouts = spec.out_dst if spec.out_dst is not None else spec.out_src
        places = [cut(layouts[name]) for name in spec.out_names if name is not None]
        total = torch.zeros((), dtype=torch.float64)
        for place, (out, dim) in enumerate(zip(outputs, places, strict=True)):
            if out.is_floating_point():
                whole = out if dim is None else torch.cat((out, out), dim)
                total = total + (out * local(upstream(place, whole), dim, mesh)).sum()
        total.backward()
    found = {name: item.grad for name, item in inputs.items() if isinstance(item, Tensor) and item.grad is not None}
    found = {name: gathered(grad, dims.get(name), mesh) for name, grad in found.items()}
    own = {name: grad for name, grad in full_gradients(ours, state.planned).items() if grad is not None}
    return [gathered(out.detach(), dim, mesh) for out, dim in zip(outputs, places, strict=True)], found | own


def cut(layout: Any) -> int | None:
    placement = layout.get("tp")
    return placement.dim if isinstance(placement, Shard) else None


def local(item: Any, dim: int | None, mesh: MeshContext) -> Any:
    return item if dim is None else item.chunk(2, dim)[mesh.axis("tp").rank].clone()


def gathered(item: Tensor, dim: int | None, mesh: MeshContext) -> Tensor:
    return item if dim is None else all_gather(item, dim=dim, axis=mesh.axis("tp"), backward="split").detach()


@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence parallel", "off"])
def test_two_ranks_compute_what_the_reference_does(sequence_parallel: bool) -> None:
    ranks = run_ranks(2, on_two_ranks, sequence_parallel)
    for name, case in CASES.items():
        expected = reference(case)
        for found in ranks:
            assert_equal(found[name], expected)


def test_every_family_and_member_has_a_case() -> None:
    """So that a new component, or a new member of one, is compared as the others are."""
    for family in FAMILIES.values():
        cases = [case for case in CASES.values() if case.family == family.name]
        asked = {tuple(case.arguments.get(key, spec.default) for key, spec in family.selectors.items()) for case in cases}
        assert {tuple(row.when[key] for key in family.selectors) for row in decision_table(family)} <= asked, family.name
