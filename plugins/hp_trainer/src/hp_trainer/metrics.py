"""The numbers of a run: one JSON line per step, and the same as TensorBoard scalars."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import attrs
from torch.utils.tensorboard import SummaryWriter

from hp_trainer.files import writing


@attrs.frozen(kw_only=True)
class StepRecord:
    """What one step reports.

    ``loss``: mean over the step's label tokens, the one-process value on every mesh. ``eval_loss``: held-out mean after
    this step, null where none was taken. ``grad_norm``: before clipping. ``tokens``: label tokens since the first step.
    ``seconds``: wall time of this step without evaluation; ``tokens_per_second``: this step's tokens over it.
    Where the recipe's ``loss`` asks something of routers, else absent: ``aux_loss`` and ``router_z`` (no coefficients), and
    ``expert_imbalance``, the tokens of the busiest expert over its layer's mean (1 is even); where correction biases are
    moved, ``bias_move``, by how much on average in this step, and ``bias_size``, the largest of them after it.
    """

    step: int
    loss: float
    eval_loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    seconds: float
    aux_loss: float | None = None
    router_z: float | None = None
    expert_imbalance: float | None = None
    bias_move: float | None = None
    bias_size: float | None = None


def _written(field: attrs.Attribute[object], value: object) -> bool:
    """Whether a field is in every line: those with a default only where there is something to say."""
    return value is not None or field.default is attrs.NOTHING


class MetricsWriter:
    """Writes ``metrics.jsonl`` line by line, flushed, and ``tensorboard/`` if asked for. A context manager.

    Raises:
        RunError: HP704 if a line cannot be written.
    """

    def __init__(self, directory: Path, *, tensorboard: Path | None) -> None:
        self._path = directory / "metrics.jsonl"
        self._scalars = tensorboard
        self._board: SummaryWriter | None = None
        self._stack = ExitStack()

    def __enter__(self) -> MetricsWriter:
        with writing(self._path):
            self._file = self._stack.enter_context(open(self._path, "a", encoding="utf-8"))
        if self._scalars:
            with writing(self._scalars):
                self._board = SummaryWriter(str(self._scalars))
                self._stack.callback(self._board.close)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with writing(self._path):
            self._stack.close()

    def write(self, record: StepRecord) -> None:
        """Append ``record``; on return it is in the file."""
        with writing(self._path):
            self._file.write(json.dumps(attrs.asdict(record, filter=_written)) + "\n")
            self._file.flush()
        if self._board and self._scalars:
            with writing(self._scalars):
                self._add_scalars(self._board, record)

    def _add_scalars(self, board: SummaryWriter, record: StepRecord) -> None:
        for name, value in attrs.asdict(record).items():
            if name != "step" and value is not None:
                board.add_scalar(f"train/{name}" if name != "eval_loss" else "eval/loss", value, record.step)
