"""What a run writes and prints: on rank 0 everything, on the others nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

from hp_core.planner.serialise import plan_to_json
from hp_trainer.data.windows import window_count
from hp_trainer.environment import environment_json
from hp_trainer.files import write_text
from hp_trainer.loop import Outcome
from hp_trainer.metrics import MetricsWriter, StepRecord
from hp_trainer.phases import say
from hp_trainer.progress import Progress
from hp_trainer.session import Session


class Reports(Protocol):
    """Somebody who is told how a run goes."""

    def begin(self) -> None:
        """The model and the data are ready."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""

    def end(self, outcome: Outcome, *, exported: Path | None) -> None:
        """Everything is done."""


class Silence:
    """Says and writes nothing. A context manager like :class:`Output`."""

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def begin(self) -> None:
        """Say nothing."""

    def step(self, record: StepRecord) -> None:
        """Say nothing."""

    def end(self, outcome: Outcome, *, exported: Path | None) -> None:
        """Say nothing."""


class Output:
    """Writes the run directory and shows the progress. A context manager.

    On entering: ``recipe.yaml`` (resolved), ``plan.json`` and ``environment.json``; then ``metrics.jsonl``, ``tensorboard/``
    and ``log.txt`` as the run goes.

    Raises:
        RunError: HP704 if one of them cannot be written.
    """

    def __init__(self, session: Session, *, directory: Path) -> None:
        self._session = session
        self._directory = directory
        self._stack = ExitStack()

    def __enter__(self) -> Reports:
        session, directory = self._session, self._directory
        write_text(directory / "recipe.yaml", session.job.recipe.to_yaml())
        write_text(directory / "plan.json", plan_to_json(session.plan))
        write_text(directory / "environment.json", environment_json(session))
        with ExitStack() as stack:
            board = directory / "tensorboard" if session.job.run.tensorboard else None
            self._metrics = stack.enter_context(MetricsWriter(directory, tensorboard=board))
            self._progress = stack.enter_context(Progress(directory, steps=session.job.train.steps))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Say what is about to be trained, on what, and where the files go."""
        plan, job = self._session.plan, self._session.job
        parameters = sum(_elements(parameter.shape) for parameter in plan.parameters)
        windows = window_count(len(self._session.train_row), sequence=job.train.sequence_length)
        ranks = "1 rank" if job.topology.world == 1 else f"{job.topology.world} ranks"
        self._progress.message(
            f"{plan.adapter}: {parameters:,} parameters on {ranks} ({job.topology}); {windows:,} windows of"
            f" {job.train.sequence_length} tokens, {job.train.global_batch_size} a step; writing to {self._directory}"
        )
        if sockets := self._session.mesh.over_sockets:
            self._progress.message(f"{', '.join(sockets)} go through sockets: their ranks cannot share memory (/dev/shm)")
        if self._session.cpu_matmul.speedup is not None:
            self._progress.message(f"products on the CPU: {self._session.cpu_matmul}")
        say("making the first step, the slowest one")

    def step(self, record: StepRecord) -> None:
        """Write and show ``record``."""
        self._metrics.write(record)
        self._progress.step(record)

    def end(self, outcome: Outcome, *, exported: Path | None) -> None:
        """Say how the run ended."""
        last, steps = outcome.last, self._session.job.train.steps
        state = f"stopped on request after step {last.step} of {steps}" if outcome.stopped else f"done after {steps} steps"
        held_out = "" if last.eval_loss is None else f", held-out loss {last.eval_loss:.4f}"
        if outcome.stopped and self._session.held_out_row is not None:
            held_out = ", no held-out loss: a run that is stopped does not evaluate"
        files = f"; Hugging Face checkpoint in {exported}" if exported else ""
        self._progress.message(f"{state}: loss {last.loss:.4f}{held_out}{files}")


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
