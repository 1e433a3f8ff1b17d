"""Recipes with overrides, on two ranks: changed layouts, replaced modules and methods give Hugging Face's gradients; schemes
compute each boundary in its dtype."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hp_core.applier.apply import apply
from hp_core.mesh.context import MeshContext, start_single
from hp_core.models.build import build
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
CODE = "hp_tests_applier_trusted_code"
HEADS = {"hidden_states": {"tp": "shard(2)"}}  # [B, S, N, D]: the heads are cut
Q_NORM = {
    "match": "model.layers.*.self_attn.q_norm",
    "params": {"weight": {"tp": "replicate"}},
    "in_src": HEADS,
    "in_dst": HEADS,
    "out_src": {"output": {"tp": "shard(2)"}},
    "out_dst": {"output": {"tp": "shard(2)"}},
}
WHOLE_MLP = [  # layer 0's dense MLP is not cut: every rank computes its own tokens with whole matrices
    {
        "match": "model.layers.0.mlp",
        "params": {f"{name}_proj.weight": {"tp": "replicate"} for name in ("gate", "up", "down")},
        "in_dst": {"x": {"tp": "shard(1)"}},
        "out_src": {"output": {"tp": "shard(1)"}},
    }
]
NORMS = {
    "match": ["model.layers.*.input_layernorm", "model.norm"],
    "replace": {"kind": "module", "implementation": f"{CODE}:PlainNorm", "source_type": "Qwen3MoeRMSNorm"},
}
METHOD = {
    "match": "model.layers.*.post_attention_layernorm.forward",
    "replace": {"kind": "method", "implementation": f"{CODE}:twice_halved", "source_type": "PlainNorm"},
}
EPS = {"match": "model.layers.*.post_attention_layernorm", "replace": {**NORMS["replace"]}}


def component(match: Any, name: str, source: str) -> dict[str, Any]:
    """Return the override that puts a registered component in a place."""
    return {"match": match, "replace": {"kind": "module", "implementation": name, "source_type": source}}


COMPONENTS = [
    component(["model.layers.*layernorm", "model.norm"], "rms_norm", "Qwen3MoeRMSNorm"),
    component("model.layers.*.self_attn", "gqa_attention", "Qwen3MoeAttention"),
    component("model.layers.0.mlp", "swiglu_mlp", "Qwen3MoeMLP"),
]
CELLS: dict[str, list[dict[str, Any]]] = {
    "norms, attention and dense blocks are components": COMPONENTS,
    "a new boundary inside another": [Q_NORM],
    "a block that is not cut": WHOLE_MLP,
    "modules and then a method of trusted code": [NORMS, EPS, METHOD],
}


def recipe_of(overrides: list[dict[str, Any]], **sections: Any) -> Any:
    """Return the small Qwen3-MoE on tp=2 with overrides."""
    _neighbour("trusted_code")
    model = {"adapter": "qwen3_moe", "config": dict(cells.CONFIG), "dtype": "float64"}
    data = {"model": model, "precision": {"reduce": "float64"}, "mesh": {"tp": 2}, "overrides": overrides, **sections}
    return recipe_from_dict(data, plugins=load_plugins(), trust=[CODE])


def gradients() -> dict[str, dict[str, Any]]:
    """Return every cell's gradients, whole."""
    found = {}
    for name, overrides in CELLS.items():
        with promote():
            model, plan, mesh = cells.make(recipe_of(overrides))
            cells.set_weights(model, plan)
            cells.step(model, mesh)
        found[name] = full_gradients(model, plan)
    return found


@pytest.fixture(scope="module")
def outcomes() -> tuple[dict[str, Any], Any]:
    return run_ranks(2, gradients)[0], run_forked(cells.reference, {})


@pytest.mark.distributed
@pytest.mark.parametrize("name", CELLS)
def test_every_gradient_equals_hugging_face(outcomes: tuple[dict[str, Any], Any], name: str) -> None:
    found, expected = outcomes
    for key, wanted in expected.gradients.items():
        assert (found[name][key] - wanted).abs().max() <= 1e-9 * max(1.0, float(wanted.abs().max())), key


def test_trusted_code_is_recorded_in_the_plan() -> None:
    plan = build(recipe_of([NORMS, EPS, METHOD])).plan
    assert plan.trusted == (CODE,)
    assert f"{CODE} (trusted)" in plan.plugins
    assert plan.notes[-1] == f"{CODE} is trusted by the command line: the recipe names code of it"
    assert {change.field for change in plan.changes} == {"module", "method"}
    assert [(change.fqn, change.before, change.after) for change in plan.changes][-1] == (
        "model.layers.2.post_attention_layernorm.forward",
        "PlainNorm.forward",
        "twice_halved",
    )


DTYPES = {
    "model.embed_tokens": "bfloat16",
    "model.layers.1.input_layernorm": "float32",
    "model.layers.1.self_attn": "bfloat16",
    "model.layers.1.mlp.gate": "float32",
    "model.layers.1.mlp.experts": "bfloat16",
    "model.norm": "float32",
    "lm_head": "float32",
}


def computed_in(world: int) -> list[str]:
    """Run one step of the bf16 scheme on every rank; return where a dtype, or the loss, is not what it should be."""
    start_single()
    exact, wrong = _loss({}, world), []
    mixed = _loss({"scheme": "bf16_fp32_router"}, world, watch=wrong)
    return wrong + ([] if abs(mixed - exact) < 0.01 * exact else [f"the loss is {mixed} instead of {exact}"])


def _loss(precision: dict[str, str], world: int, *, watch: list[str] | None = None) -> float:
    model = {"adapter": "qwen3_moe", "config": dict(cells.CONFIG), "dtype": "float32"}
    data = {"model": model, "precision": precision, "mesh": {"tp": world}}
    recipe = recipe_from_dict(data, plugins=load_plugins())
    mesh = MeshContext.create(recipe.topology(world=dist.get_world_size()))
    built = build(recipe, mesh=mesh)
    live = apply(built.model, built.plan, mesh)
    cells.set_weights(live, built.plan)
    if watch is not None:
        for fqn, dtype in DTYPES.items():
            _watch(live.get_submodule(fqn), fqn, getattr(torch, dtype), watch)
    loss = cells.step(live, mesh)
    if watch is not None:
        gradients = {name: parameter.grad.dtype for name, parameter in live.named_parameters()}
        watch += [f"gradient of {name} is {dtype}" for name, dtype in gradients.items() if dtype != torch.float32]
    return loss


def _watch(module: Any, fqn: str, dtype: torch.dtype, wrong: list[str]) -> None:
    """Look at what the body itself computes with: the derived forwards of the boundary lie outside it."""
    body = next(cls for cls in type(module).__mro__ if "__hp_wrapped__" not in vars(cls) and "forward" in vars(cls))
    own = body.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            floats = {
                k: v for k, v in (*enumerate(args), *kwargs.items()) if isinstance(v, torch.Tensor) and v.is_floating_point()
            }
            fixed = 2 if fqn.endswith("experts") else None
            wrong.extend(
                f"{fqn}: {k} is {v.dtype}" for k, v in floats.items() if k not in (fixed, "top_k_weights") and v.dtype != dtype
            )
            wrong.extend(f"{fqn}: {n} is {p.dtype}" for n, p in self._parameters.items() if p is not None and p.dtype != dtype)
        return own(self, *args, **kwargs)

    body.forward = forward


@pytest.mark.distributed
def test_the_scheme_computes_every_boundary_in_its_dtype() -> None:
    assert run_ranks(2, computed_in, 2) == [[], []]
