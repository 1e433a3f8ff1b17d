"""The loop on one and two ranks: one loss curve, whatever the mesh and the accumulation."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from hp_core.errors import HPError
from hp_core.plugins.load import load_plugins
from hp_core.state.full import full_state
from hp_core.testing.promote import promote
from hp_core.testing.ranks import run_ranks
from hp_trainer.evaluation import held_out_calls
from hp_trainer.job import load_job
from hp_trainer.loop import train_loop
from hp_trainer.metrics import StepRecord
from hp_trainer.worker import start_session

pytestmark = pytest.mark.distributed
Curve = tuple[list[float], list[float], dict[int, float], list[float]]
FP64 = ("model.dtype=float64", "precision.compute=float64", "precision.reduce=float64")


def train(path: Path, sets: tuple[str, ...], stop_after: int = 0) -> dict[str, Any]:
    """Train as one rank of a job; return what the steps reported, how the run ended and the sum of each parameter."""
    torch.set_num_threads(1)
    world = torch.distributed.get_world_size()
    records: list[StepRecord] = []
    wants = stop_after and torch.distributed.get_rank() == world - 1
    # Hugging Face computes norms and routers in fp32 even in a float64 model
    with promote() if set(FP64) <= set(sets) else nullcontext():
        session = start_session(load_job(path, plugins=load_plugins(), sets=sets, world=world), device="cpu")
        outcome = train_loop(session, stop=lambda: bool(wants) and len(records) + 1 >= stop_after, on_step=records.append)
    state = full_state(session.model, session.plan)
    return {
        "records": records,
        "stopped": outcome.stopped,
        "sums": {name: tensor.double().abs().sum().item() for name, tensor in state.items()},
    }


def curve(path: Path, *sets: str, world: int = 1) -> Curve:
    """Return losses, norms, held-out losses by step, and the parameters' sums, in fp64; checks that the ranks agree."""
    results = run_ranks(world, train, path, (*FP64, *sets))
    for other in results[1:]:
        assert [r.loss for r in other["records"]] == [r.loss for r in results[0]["records"]]
    records = results[0]["records"]
    held_out = {r.step: r.eval_loss for r in records if r.eval_loss is not None}
    sums = list(results[0]["sums"].values())
    return [r.loss for r in records], [r.grad_norm for r in records], held_out, sums


@pytest.fixture(scope="module")
def one_process(module_recipe: Path) -> Curve:
    return curve(module_recipe)


def assert_same(found: Curve, expected: Curve) -> None:
    for mine, reference in zip(found, expected, strict=True):
        assert mine == pytest.approx(reference, rel=1e-9)


def test_losses_fall_and_held_out_losses_are_taken_when_asked(one_process: Curve) -> None:
    losses, norms, held_out, _ = one_process
    assert losses[-1] < losses[0]
    assert min(norms) > 0
    assert list(held_out) == [2, 4, 5]


@pytest.mark.parametrize("mesh", ["tp=2", "dp_shard=2", "dp_replicate=2", "cp=2"])
def test_two_ranks_have_the_curve_of_one(recipe: Path, one_process: Curve, mesh: str) -> None:
    assert_same(curve(recipe, f"mesh.{mesh}", world=2), one_process)


@pytest.fixture(scope="module")
def twenty_steps(module_recipe: Path) -> Curve:
    return curve(module_recipe, "train.steps=20")


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.tp=2", "mesh.ep=2"),
        ("mesh.tp=2", "mesh.ep=2", "mesh.sequence_parallel=false"),
        ("mesh.dp_shard=2", "mesh.ep=2", "protocols.ep=all_to_all"),
    ],
    ids=" ".join,
)
def test_experts_on_two_ranks_have_the_curve_of_one_over_twenty_steps(
    recipe: Path, twenty_steps: Curve, mesh: tuple[str, ...]
) -> None:
    pytest.importorskip("hp_expert_parallel", reason="experts over ep need a protocol")
    assert_same(curve(recipe, "train.steps=20", *mesh, world=2), twenty_steps)


def test_four_micro_batches_have_the_curve_of_one(recipe: Path, one_process: Curve) -> None:
    assert_same(curve(recipe, "train.micro_batch_size=8"), one_process)
    assert_same(curve(recipe, "train.micro_batch_size=1", "mesh.dp_shard=2", world=2), one_process)


def test_sgd_and_no_clipping_have_the_same_curve_on_two_ranks(recipe: Path) -> None:
    sets = ("train.optimizer.name=sgd", "train.optimizer.lr=0.5", "train.grad_clip=null", "train.steps=3")
    assert_same(curve(recipe, *sets, "mesh.dp_shard=2", world=2), curve(recipe, *sets))


def test_clipping_scales_the_step_of_sgd(recipe: Path) -> None:
    """One step clipped to a norm is the step of a rate that is smaller by as much."""
    sgd = (*FP64, "train.optimizer.name=sgd", "train.optimizer.weight_decay=0", "train.steps=2")
    free = run_ranks(1, train, recipe, (*sgd, "train.optimizer.lr=0.5", "train.grad_clip=null"))[0]["records"]
    limit = free[0].grad_norm / 4
    clipped, slower = (
        run_ranks(1, train, recipe, (*sgd, f"train.optimizer.lr={lr}", f"train.grad_clip={clip}"))[0]["records"]
        for lr, clip in ((0.5, limit), (0.125, "null"))
    )
    assert clipped[0].grad_norm == free[0].grad_norm  # before clipping
    assert clipped[1].loss == pytest.approx(slower[1].loss, rel=1e-6)
    assert clipped[1].loss != pytest.approx(free[1].loss, rel=1e-3)


BALANCED = ("loss.aux.coefficient=0.1", "loss.router_z=0.01", "train.steps=3")


def balance(path: Path, *sets: str, world: int = 1) -> list[tuple[float | None, ...]]:
    """Return what the steps report of routers, the same on every rank."""
    results = run_ranks(world, train, path, (*FP64, *BALANCED, *sets))
    by_rank = [[(r.loss, r.grad_norm, r.aux_loss, r.router_z, r.expert_imbalance) for r in one["records"]] for one in results]
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


def test_router_losses_are_those_of_one_process_on_two_ranks(recipe: Path) -> None:
    expected = balance(recipe)
    plain = run_ranks(1, train, recipe, (*FP64, "train.steps=3"))[0]["records"]
    assert [r.aux_loss for r in plain] == [None] * 3
    assert expected[1][0] != pytest.approx(plain[1].loss, rel=1e-9)
    assert expected[0][0] == pytest.approx(plain[0].loss, rel=1e-12)
    assert all(1.0 <= aux <= 4.0 for _, _, aux, _, _ in expected)  # type: ignore[operator]
    for mine, one in zip(balance(recipe, "mesh.tp=2", "recompute.mode=full", world=2), expected, strict=True):
        assert mine == pytest.approx(one, rel=1e-9)


def test_a_request_on_one_rank_stops_all_after_the_same_whole_step(recipe: Path) -> None:
    results = run_ranks(2, train, recipe, ("mesh.tp=2",), 3)
    assert [(len(result["records"]), result["stopped"]) for result in results] == [(3, True)] * 2


def test_a_loss_that_is_not_finite_ends_the_run(recipe: Path) -> None:
    assert run_ranks(1, diverge, recipe) == [
        "hp: error[HP706]: the loss of step 2 is nan; expected a finite number."
        " fix: lower train.optimizer.lr, raise train.scheduler.warmup_steps or set train.grad_clip"
    ]


def diverge(path: Path) -> str:
    """Train with a parameter that becomes infinite after the first step; return the error's line."""
    torch.set_num_threads(1)
    session = start_session(load_job(path, plugins=load_plugins(), world=1), device="cpu")

    def spoil(record: StepRecord) -> None:
        with torch.no_grad():
            next(session.model.parameters()).fill_(float("inf"))

    try:
        train_loop(session, stop=lambda: False, on_step=spoil)
    except HPError as error:
        return error.line
    return ""


def test_deterministic_runs_are_equal_bit_by_bit(recipe: Path) -> None:
    sets = ("train.deterministic=true", "train.steps=3")
    first, second = (run_ranks(1, train, recipe, sets)[0] for _ in range(2))
    assert [attrs.evolve(r, seconds=0.0, tokens_per_second=0.0) for r in first["records"]] == [
        attrs.evolve(r, seconds=0.0, tokens_per_second=0.0) for r in second["records"]
    ]
    assert first["sums"] == second["sums"]


def calls(path: Path, sets: tuple[str, ...]) -> list[list[int | None]]:
    """Return the held-out windows of each call of this rank."""
    job = load_job(path, plugins=load_plugins(), sets=sets, world=torch.distributed.get_world_size())
    return held_out_calls(start_session(job, device="cpu"))


def test_ranks_share_the_held_out_windows_and_fill_up_the_last_calls(recipe: Path) -> None:
    # 1,200 held-out tokens are 37 windows of 32; the last call of rank 1 finds none and runs filling
    every = run_ranks(2, calls, recipe, ("mesh.dp_shard=2", "train.eval.batches=0"))
    assert [len(mine) for mine in every] == [10, 10]
    assert (every[0][:2], every[0][-1], every[1][:2], every[1][-1]) == (
        [[0, 1], [4, 5]],
        [36, None],
        [[2, 3], [6, 7]],
        [None, None],
    )
    first_batch = run_ranks(2, calls, recipe, ("mesh.dp_shard=2", "train.eval.batches=1"))
    assert first_batch == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


PACKED = ("data.packing=true", "train.global_batch_size=4", "train.steps=3", "train.eval.every=0")


def write_documents(folder: Path) -> None:
    """Write documents of one to some hundred bytes beside the recipe."""
    (folder / "documents").mkdir()
    for index in range(60):
        (folder / "documents" / f"{index:02}.txt").write_text(chr(97 + index % 26) * (1 + (index * index * 7) % 150))


@pytest.mark.parametrize(
    ("sets", "world"),
    [
        (("mesh.cp=2", "protocols.cp=ring"), 2),
        (("mesh.dp_shard=2", "train.micro_batch_size=1"), 2),
        (("mesh.cp=2", "train.sequence_length=30"), 2),
    ],
)
def test_packed_documents_have_one_curve_on_every_mesh(recipe: Path, sets: tuple[str, ...], world: int) -> None:
    write_documents(recipe.parent)
    packed = (*PACKED, f"data.path={recipe.parent / 'documents'}")
    alone = tuple(name for name in sets if name.startswith("train.sequence"))
    assert_same(curve(recipe, *packed, *sets, world=world), curve(recipe, *packed, *alone))


def test_rows_of_odd_length_are_padded_for_cp(recipe: Path) -> None:
    sets = ("train.sequence_length=29", "train.steps=2")
    assert_same(curve(recipe, *sets, "mesh.cp=2", world=2), curve(recipe, *sets))


def test_twenty_steps_over_cp_and_ep_have_the_curve_of_one_process(recipe: Path) -> None:
    sets = ("train.steps=20", "train.eval.every=0")
    assert_same(curve(recipe, *sets, "mesh.cp=2", "mesh.ep=2", world=2), curve(recipe, *sets))
