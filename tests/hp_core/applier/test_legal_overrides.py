"""Layouts that a recipe may ask for: every single change of the small Qwen3-MoE, and every uniform change of a whole boundary,
is refused by the planner or gives Hugging Face's gradients on two ranks. Nothing in between.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hp_core.contracts import BuildPlan
from hp_core.errors import HPError
from hp_core.mesh.context import start_single
from hp_core.models.build import build_model
from hp_core.planner.plan import plan
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import recipe_from_dict
from hp_core.state.full import full_gradients
from hp_core.testing.promote import promote
from hp_core.testing.ranks import run_forked, run_ranks

pytest.importorskip("hp_qwen3_moe")


def _neighbour(name: str) -> ModuleType:
    """Import a helper that lies beside this file, once; test folders are no packages."""
    full = f"hp_tests_applier_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


cells = _neighbour("cells")
PLACEMENTS = ("replicate", "shard(0)", "shard(1)", "shard(2)", "partial")
KINDS = (  # one of each kind of boundary
    "model.embed_tokens",
    "model.rotary_emb",
    "model.layers.0.mlp",
    "model.layers.1.input_layernorm",
    "model.layers.1.self_attn",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.experts",
    "lm_head",
)
Override = dict[str, Any]


def recipe_of(overrides: list[Override], *, sequence_parallel: bool) -> Any:
    model = {"adapter": "qwen3_moe", "config": dict(cells.CONFIG), "dtype": "float64"}
    data = {
        "model": model,
        "precision": {"reduce": "float64"},
        "mesh": {"tp": 2, "sequence_parallel": sequence_parallel},
        "overrides": overrides,
    }
    return recipe_from_dict(data, plugins=load_plugins())


def candidates(fqn: str, spec: Any) -> Iterator[Override]:
    """Yield every change of one name of one field, every field set to nothing, and every uniform change of the body."""
    names = {
        "params": spec.params,
        "in_src": spec.in_src,
        "in_dst": spec.in_src,
        "out_src": spec.out_src,
        "out_dst": spec.out_src,
    }
    for field, keys in names.items():
        yield {"match": fqn, field: {}}
        for key, placement in itertools.product(keys, PLACEMENTS):
            yield {"match": fqn, field: {key: {"tp": placement}}}
    body = ("params", "in_dst", "out_src")
    for chosen in itertools.product((None, *PLACEMENTS), repeat=len(body)):
        fields = {
            field: {name: {"tp": placement} for name in names[field]}
            for field, placement in zip(body, chosen, strict=True)
            if placement is not None and names[field]
        }
        if len(fields) > 1:
            yield {"match": fqn, **fields}


@functools.cache
def sorted_out(*, sequence_parallel: bool) -> tuple[dict[str, Override], list[tuple[Override, HPError]]]:
    """Return the overrides that plan otherwise than the recipe without them, one of each outcome, and the refused ones."""
    plain = recipe_of([], sequence_parallel=sequence_parallel)
    _, inventory = build_model(plain)
    seen = [work_of(plan(inventory, plain, plain.topology()))]
    accepted, refused = {}, []
    for boundary in plan(inventory, plain, plain.topology()).boundaries:
        if boundary.fqn not in KINDS:
            continue
        for override in candidates(boundary.fqn, boundary.spec):
            recipe = recipe_of([override], sequence_parallel=sequence_parallel)
            try:
                work = work_of(plan(inventory, recipe, recipe.topology()))
            except HPError as error:
                refused.append((override, error))
                continue
            if work not in seen:
                seen.append(work)
                accepted[f"{boundary.fqn} {len(seen)}"] = override
    return accepted, refused


def work_of(made: BuildPlan) -> Any:
    """Return what applying a plan does with layouts."""
    return [boundary.collectives for boundary in made.boundaries], [(p.layout, p.gradient) for p in made.parameters]


def gradients(overrides: Mapping[str, Override], sequence_parallel: bool) -> dict[str, dict[str, Any]]:
    """Return the whole gradients of every override."""
    start_single()
    found = {}
    for name, override in overrides.items():
        with promote():
            model, made, mesh = cells.make(recipe_of([override], sequence_parallel=sequence_parallel))
            cells.set_weights(model, made)
            cells.step(model, mesh)
        found[name] = full_gradients(model, made)
    return found


EXPECTED = {True: ("embed_tokens", "layers.0.mlp", "mlp.experts", "lm_head")}
EXPECTED[False] = (*EXPECTED[True], "self_attn", "mlp.gate", "input_layernorm")


@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_is_accepted_gives_hugging_face_s_gradients(sequence_parallel: bool) -> None:
    accepted, _ = sorted_out(sequence_parallel=sequence_parallel)
    for part in EXPECTED[sequence_parallel]:
        assert any(part in name for name in accepted), part
    expected = run_forked(cells.reference, {}).gradients
    found = run_ranks(2, gradients, accepted, sequence_parallel)[0]
    for name, cell in found.items():
        for key, wanted in expected.items():
            assert (cell[key] - wanted).abs().max() <= 1e-9 * max(1.0, float(wanted.abs().max())), (accepted[name], key)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_is_refused_names_the_recipe_s_line(sequence_parallel: bool) -> None:
    _, refused = sorted_out(sequence_parallel=sequence_parallel)
    assert {error.code for _, error in refused} == {"HP402", "HP502", "HP521", "HP522", "HP523", "HP530"}
    assert [str(error) for override, error in refused if "recipe: overrides.0" not in error.where] == []
