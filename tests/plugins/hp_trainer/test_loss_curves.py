"""The shipped recipes train on meshes with experts and context cut as they do in one process: one loss curve."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hp_core.plugins.load import load_plugins
from hp_core.testing.promote import promote
from hp_core.testing.ranks import run_ranks
from hp_trainer.job import load_job
from hp_trainer.loop import train_loop
from hp_trainer.metrics import StepRecord
from hp_trainer.worker import start_session

pytestmark = [pytest.mark.distributed, pytest.mark.matrix]
ROOT = Path(__file__).resolve().parents[3]
RECIPES = {name: ROOT / name / "recipes" / "tiny.yaml" for name in ("hp_qwen3_moe", "hp_deepseek")}
FP64 = ("model.dtype=float64", "precision.compute=float64", "precision.reduce=float64")
FEWER_TOKENS = ("train.steps=20", "train.global_batch_size=4", "train.micro_batch_size=2", "train.sequence_length=64")
MESHES = {"tp2 x ep2": ("mesh.tp=2", "mesh.ep=2"), "cp2 x ep2": ("mesh.cp=2", "mesh.ep=2")}


def train(path: Path, sets: tuple[str, ...]) -> list[tuple[float, float]]:
    """Train as one rank of a job; return loss and gradient norm of every step."""
    world = torch.distributed.get_world_size()
    records: list[StepRecord] = []
    with promote() if set(FP64) <= set(sets) else nullcontext():
        session = start_session(load_job(path, plugins=load_plugins(), sets=sets, world=world), device="cpu")
        train_loop(session, stop=lambda: False, on_step=records.append)
    return [(record.loss, record.grad_norm) for record in records]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, ...], list[tuple[float, float]]]:
    """Curves of one process that were made already."""
    return {}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("precision", "allowed"), [(FP64, 1e-9), ((), 1e-3)], ids=["fp64", "fp32"])
def test_the_curve_is_that_of_one_process(
    name: str,
    mesh: str,
    precision: tuple[str, ...],
    allowed: float,
    alone: dict[tuple[str, ...], list[tuple[float, float]]],
) -> None:
    sets = (*FEWER_TOKENS, *precision)
    key = (name, *sets)
    if key not in alone:
        alone[key] = run_ranks(1, train, RECIPES[name], sets, timeout=300)[0]
    found = run_ranks(2, train, RECIPES[name], (*sets, *MESHES[mesh]), timeout=300)
    assert found[0] == found[1]
    losses, expected = [loss for loss, _ in found[0]], [loss for loss, _ in alone[key]]
    assert losses == pytest.approx(expected, rel=allowed)
    assert losses[-1] < losses[0]
