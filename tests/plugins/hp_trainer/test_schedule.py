"""The learning rate's formulas, as numbers."""

from __future__ import annotations

import pytest

from hp_trainer.schedule import learning_rate
from hp_trainer.sections import Optimizer, Scheduler, Train


def rates(name: str, *, steps: int, warmup: int) -> list[float]:
    train = Train(
        steps=steps,
        optimizer=Optimizer(lr=8.0),
        scheduler=Scheduler(name=name, warmup_steps=warmup),  # type: ignore[arg-type]
    )
    return [learning_rate(step, train=train) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("name", "warmup", "expected"),
    [
        ("constant", 0, [8, 8, 8, 8]),
        ("constant", 2, [4, 8, 8, 8]),
        ("linear", 0, [8, 6, 4, 2]),
        ("linear", 2, [4, 8, 8, 4]),
        ("cosine", 0, [8, 6.8284271, 4, 1.1715729]),
        ("cosine", 2, [4, 8, 8, 4]),
        ("cosine", 4, [2, 4, 6, 8]),
        ("linear", 8, [1, 2, 3, 4]),
    ],
)
def test_four_steps_have_these_rates(name: str, warmup: int, expected: list[float]) -> None:
    assert rates(name, steps=4, warmup=warmup) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_the_rate_is_positive_to_the_last_step(name: str) -> None:
    assert min(rates(name, steps=100, warmup=10)) > 0
