"""What a person sees."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from hp_core.errors import RunError
from hp_trainer.metrics import StepRecord
from hp_trainer.progress import Progress, progress_line


def record(step: int, *, eval_loss: float | None = None) -> StepRecord:
    return StepRecord(
        step=step, loss=2.5, eval_loss=eval_loss, grad_norm=1.5, lr=3e-4, tokens=64, tokens_per_second=12345.6, seconds=0.5
    )


def test_a_line_says_step_loss_rate_speed_and_what_is_left() -> None:
    assert progress_line(record(7), steps=100, held_out=None, eta=83.4) == (
        "step 7/100  loss 2.5000  lr 3.00e-04  norm 1.50  12,346 tokens/s  eta 0:01:23"
    )
    routed = attrs.evolve(record(7), expert_imbalance=1.75, bias_move=9e-4, bias_size=0.0125)
    assert progress_line(routed, steps=100, held_out=None, eta=83.4).endswith(
        "12,346 tokens/s  imbalance 1.75  bias moved 9.0e-04, largest 1.3e-02  eta 0:01:23"
    )
    assert "loss 2.5000  held-out 2.2500  lr" in progress_line(record(7), steps=100, held_out=2.25, eta=0)


def test_without_a_terminal_the_first_the_last_and_evaluated_steps_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(tmp_path, steps=50) as progress:
        progress.message("hello [not markup]")
        for step in range(1, 51):
            progress.step(record(step, eval_loss=2.25 if step == 20 else None))
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed] == ["hello [not markup]", "step 1/50", "step 20/50", "step 50/50"]
    assert printed[-1].split("  ")[2] == "held-out 2.2500"
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[len("2026-01-01 00:00:00 ") :] for line in logged] == printed


def test_the_time_left_forgets_the_slow_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(tmp_path, steps=3) as progress:
        progress.step(attrs.evolve(record(1), seconds=100.0))
        progress.step(attrs.evolve(record(2, eval_loss=1.0), seconds=2.0))
    assert [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()] == ["eta 0:03:20", "eta 0:00:02"]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with (
        pytest.raises(RunError, match=r"HP704: .*/log.txt cannot be written: No space left on device"),
        Progress(tmp_path, steps=1) as progress,
    ):
        progress.message("hello")
