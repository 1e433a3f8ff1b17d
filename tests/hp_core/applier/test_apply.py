"""Every gradient of a small Qwen3-MoE on real ranks against plain Hugging Face in one process, in float64."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hp_core.testing.ranks import run_forked, run_ranks

pytest.importorskip("hp_qwen3_moe")


def _neighbour(name: str) -> ModuleType:
    """Import a helper that lies beside this file; test folders are no packages."""
    spec = importlib.util.spec_from_file_location(f"hp_tests_applier_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cells = _neighbour("cells")
Cell = cells.Cell
TIED, FULL, SELECTIVE = {"tie_word_embeddings": True}, {"recompute": {"mode": "full"}}, {"recompute": {"mode": "selective"}}
FROZEN = ("model.embed_tokens.weight", "model.layers.1.self_attn.q_norm.weight", "model.layers.2.mlp.experts.gate_up_proj")

CELLS: dict[int, dict[str, Any]] = {
    1: {"one": Cell(), "one tied": Cell(config=TIED), "one recomputed": Cell(recipe=SELECTIVE)},
    2: {
        "tp2": Cell(mesh={"tp": 2}),
        "tp2 sp-off": Cell(mesh={"tp": 2, "sequence_parallel": False}),
        "tp2 loss-parallel off": Cell(mesh={"tp": 2, "loss_parallel": False}),
        "tp2 tied": Cell(mesh={"tp": 2}, config=TIED),
        "tp2 biases": Cell(mesh={"tp": 2}, config={"attention_bias": True}),
        "tp2 one kv head": Cell(mesh={"tp": 2}, config={"num_key_value_heads": 1}),
        "tp2 recomputed": Cell(mesh={"tp": 2}, recipe=FULL),
        "tp2 recomputed in part": Cell(mesh={"tp": 2}, recipe=SELECTIVE),
        "tp2 frozen": Cell(mesh={"tp": 2}, recipe={"freeze": list(FROZEN)}),
        "fsdp2": Cell(),
        "fsdp2 tied": Cell(config=TIED),
        "fsdp2 recomputed": Cell(recipe=FULL),
        "fsdp2 frozen": Cell(recipe={"freeze": list(FROZEN)}),
        "dp2": Cell(mesh={"dp_replicate": 2}),
    },
    4: {
        "tp2 fsdp2": Cell(mesh={"tp": 2}),
        "tp2 fsdp2 sp-off tied": Cell(mesh={"tp": 2, "sequence_parallel": False}, config=TIED),
        "tp4 with 2 kv heads": Cell(mesh={"tp": 4}),
        "hsdp2x2": Cell(mesh={"dp_replicate": 2}),
    },
}
NAMES = [(world, name) for world, group in CELLS.items() for name in group]


@functools.cache
def outcomes(world: int) -> list[dict[str, Any]]:
    return run_ranks(world, cells.run_cells, CELLS[world])


@functools.cache
def reference(config: tuple[tuple[str, Any], ...]) -> Any:
    return run_forked(cells.reference, dict(config))


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "name"), NAMES, ids=[name for _, name in NAMES])
def test_loss_and_every_gradient_equal_hugging_face(world: int, name: str) -> None:
    cell = CELLS[world][name]
    expected = reference(tuple(cell.config.items()))
    frozen = set(FROZEN) if "frozen" in name else set()
    largest = max(gradient.abs().max() for gradient in expected.gradients.values())
    for rank in outcomes(world):
        found = rank[name]
        assert found.loss == pytest.approx(expected.loss, abs=1e-12)
        assert set(found.gradients) == set(expected.gradients)
        for fqn, gradient in expected.gradients.items():
            if fqn in frozen:
                assert found.gradients[fqn] is None
                continue
            assert found.gradients[fqn].shape == gradient.shape, fqn
            tolerance = max(1e-9 * gradient.abs().max(), 1e-12 * largest)
            error = (found.gradients[fqn] - gradient).abs().max()
            assert error <= tolerance, f"{fqn}: {error:.1e} > {tolerance:.1e}"


@pytest.mark.distributed
def test_initial_weights_do_not_depend_on_the_mesh() -> None:
    plain = outcomes(1)[0]["one"].initial
    same = [rank[name].initial for world, name in NAMES if not CELLS[world][name].config for rank in outcomes(world)]
    assert set(same) == {plain}


def dtypes(mesh: dict[str, Any]) -> dict[str, dict[str, tuple[str, str]]]:
    """Return each parameter's dtype and its gradient's after a step, for two ways of computing in bf16."""
    cells.start_single()
    return {dtype: _dtypes(mesh, dtype) for dtype in ("float32", "bfloat16")}


def _dtypes(mesh: dict[str, Any], dtype: str) -> dict[str, tuple[str, str]]:
    recipe = Cell(mesh=mesh, recipe={"precision": {"compute": "bfloat16", "reduce": "float32"}}).load(dtype=dtype)
    model, plan, context = cells.make(recipe)
    cells.set_weights(model, plan)
    assert math.isfinite(cells.step(model, context))
    short = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    return {name: (short[parameter.dtype], short[parameter.grad.dtype]) for name, parameter in model.named_parameters()}


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "mesh"), [(1, {}), (2, {}), (2, {"tp": 2})], ids=["one", "fsdp2", "tp2"])
def test_a_router_stays_in_fp32_in_a_low_precision_model(world: int, mesh: dict[str, Any]) -> None:
    for rank in run_ranks(world, dtypes, mesh):
        for dtype, found in rank.items():
            routers = {name for name in found if name.endswith("mlp.gate.weight")}
            assert len(routers) == 2
            assert {found[name] for name in routers} == {("float32", "float32")}
            assert {found[name] for name in set(found) - routers} == {(dtype, dtype)}
