"""The loop: one optimizer step after another, until the steps are done or somebody asks to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import attrs
import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from hp_core.applier.gradients import clipped_step, gradient_norm
from hp_core.applier.routers import finish_router_step, router_loss
from hp_core.errors import RunError
from hp_trainer.data.windows import WindowOrder, micro_batches, rank_rows, window_count
from hp_trainer.evaluation import evaluate
from hp_trainer.metrics import StepRecord
from hp_trainer.optimizer import make_optimizer, set_learning_rate
from hp_trainer.schedule import learning_rate
from hp_trainer.session import Session

NAN_FIX = "lower train.optimizer.lr, raise train.scheduler.warmup_steps or set train.grad_clip"


@attrs.frozen(kw_only=True)
class Outcome:
    """How a run ended: the last step it made, and whether it was asked to stop before the end."""

    last: StepRecord
    stopped: bool


def train_loop(session: Session, *, stop: Callable[[], bool], on_step: Callable[[StepRecord], None]) -> Outcome:
    """Train until ``train.steps`` or until ``stop()`` is true on any rank; ``on_step`` gets every step's record.

    A stopped run ends after a whole step, on every rank after the same one.

    Raises:
        RunError: HP706 when a loss or a gradient norm is not finite, before the optimizer uses it.
    """
    train = session.job.train
    optimizer = make_optimizer(session.model, train=train)
    order, tokens = window_order(session), 0
    session.model.train()
    for step in range(1, train.steps + 1):
        record = _one_step(session, optimizer, windows=order.batch_windows(step - 1), step=step, before=tokens)
        tokens = record.tokens
        stopped = session.any_rank(stop()) and step < train.steps
        if not stopped and _evaluates(session, step):
            record = attrs.evolve(record, eval_loss=evaluate(session))
        on_step(record)
        if stopped:
            break
    return Outcome(last=record, stopped=stopped)


def window_order(session: Session) -> WindowOrder:
    """Return the order in which this job reads its training windows."""
    train = session.job.train
    windows = window_count(len(session.train_row), sequence=train.sequence_length)
    return WindowOrder(windows=windows, batch=train.global_batch_size, seed=train.seed, shuffle=session.job.data.shuffle)


def accumulate_gradients(session: Session, *, windows: list[int], tokens: int) -> float:
    """Run this rank's micro-batches of the global batch ``windows`` forward and backward; return the batch's mean loss.

    The objective of every micro-batch is its token losses' sum over ``tokens``, the number of label tokens in the whole
    global batch, so gradients add up to those of the one-process mean whatever the mesh and the accumulation; plus what the
    recipe's ``loss`` asks of routers, which the returned loss leaves out.
    """
    train, mesh = session.job.train, session.mesh
    rows = rank_rows(len(windows), rank=mesh.data.rank, size=mesh.data.size)
    parts = micro_batches((windows[row] for row in rows), size=train.micro_batch_size)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for number, part in enumerate(parts, start=1):
        if isinstance(session.model, FSDPModule):
            session.model.set_requires_gradient_sync(number == len(parts))
        batch = session.batch(session.train_row, windows=[*part])
        losses = session.token_losses(batch)
        (losses.sum() / tokens + router_loss(session.model, labels=batch.labels, tokens=tokens)).backward()
        total += losses.detach().double().sum()
    (loss,) = session.total(total)
    return loss / tokens


def label_tokens(session: Session, windows: list[int], *, step: int) -> int:
    """Return how many labels of a global batch count, the same on every rank; HP711 if there is none."""
    tokens = session.train_row.label_count(windows, sequence=session.job.train.sequence_length)
    if not tokens:
        text = f"the windows of step {step} have no token to predict: every document in them is one token long"
        raise RunError("HP711", text, expected="longer documents", fix="set data.packing to false")
    return tokens


def _one_step(session: Session, optimizer: Optimizer, *, windows: list[int], step: int, before: int) -> StepRecord:
    train = session.job.train
    started = time.perf_counter()
    lr = learning_rate(step, train=train)
    tokens = label_tokens(session, windows, step=step)
    loss = _finite(accumulate_gradients(session, windows=windows, tokens=tokens), name="loss", step=step)
    norm = gradient_norm(parameter for parameter in session.model.parameters() if parameter.requires_grad)
    grad_norm = _finite(float(norm), name="gradient norm", step=step)
    set_learning_rate(optimizer, lr=lr)
    if train.grad_clip is None:
        optimizer.step()
    else:
        clipped_step(optimizer, norm=norm, max_norm=train.grad_clip)
    optimizer.zero_grad()
    routed = finish_router_step(session.model)
    seconds = time.perf_counter() - started
    return StepRecord(
        step=step,
        loss=loss,
        eval_loss=None,
        grad_norm=grad_norm,
        lr=lr,
        tokens=before + tokens,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        aux_loss=None if routed is None else routed.aux,
        router_z=None if routed is None else routed.z,
        expert_imbalance=None if routed is None else routed.imbalance,
        bias_move=None if routed is None else routed.bias_move,
        bias_size=None if routed is None else routed.bias_size,
    )


def _finite(value: float, *, name: str, step: int) -> float:
    if not math.isfinite(value):
        raise RunError("HP706", f"the {name} of step {step} is {value}", expected="a finite number", fix=NAN_FIX)
    return value


def _evaluates(session: Session, step: int) -> bool:
    every = session.job.train.eval.every
    return step == session.job.train.steps or (every > 0 and step % every == 0)
