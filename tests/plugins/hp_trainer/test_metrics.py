"""metrics.jsonl and TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hp_core.errors import RunError
from hp_trainer.metrics import MetricsWriter, StepRecord


def record(step: int, *, eval_loss: float | None = None) -> StepRecord:
    return StepRecord(
        step=step, loss=2.5, eval_loss=eval_loss, grad_norm=1.5, lr=0.1, tokens=64, tokens_per_second=128.0, seconds=0.5
    )


def test_each_step_is_one_line_that_is_there_at_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=None) as metrics:
        metrics.write(record(1))
        metrics.write(record(2, eval_loss=3.0))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {
        "step": 1,
        "loss": 2.5,
        "eval_loss": None,
        "grad_norm": 1.5,
        "lr": 0.1,
        "tokens": 64,
        "tokens_per_second": 128.0,
        "seconds": 0.5,
    }
    assert json.loads(lines[1])["eval_loss"] == 3.0
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=tmp_path / "tensorboard") as metrics:
        metrics.write(record(1))
        metrics.write(record(2, eval_loss=3.0))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.5), (2, 2.5)]
    assert [(event.step, event.value) for event in events.Scalars("eval/loss")] == [(2, 3.0)]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError) as error, MetricsWriter(tmp_path, tensorboard=None) as metrics:
        metrics.write(record(1))
    assert error.value.line == (
        f"hp: error[HP704]: {tmp_path}/metrics.jsonl cannot be written: No space left on device."
        " fix: free space there, or choose another place with --run-dir"
    )
