"""Ranks: results and failures of forked jobs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from hp_core.errors import RunError
from hp_core.testing.patience import HANG_S
from hp_core.testing.ranks import run_forked, run_ranks

pytestmark = pytest.mark.distributed


def add_up(value: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = value * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), total


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven is not even")
    dist.barrier()


def vanish() -> None:
    os._exit(3)


def hang_on_rank_one() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.1)


def describe() -> tuple[bool, int]:
    return dist.is_initialized(), os.getpid()


def test_results_come_back_in_order_of_rank() -> None:
    results = run_ranks(2, add_up, torch.tensor([1.0, 2.0]))
    assert [rank for rank, _ in results] == [0, 1]
    assert [total.tolist() for _, total in results] == [[3.0, 6.0]] * 2


def test_a_forked_function_runs_elsewhere_without_a_process_group() -> None:
    initialised, process = run_forked(describe)
    assert not initialised
    assert process != os.getpid()


def test_the_error_of_a_rank_ends_the_job_with_its_traceback() -> None:
    with pytest.raises(RunError) as raised:
        run_ranks(2, fail_on_rank_one)
    assert str(raised.value) == "HP702: rank 1: ValueError: seven is not even"
    assert "in fail_on_rank_one" in str(raised.value.__cause__)


def test_a_rank_that_ends_is_an_error() -> None:
    with pytest.raises(RunError) as raised:
        run_forked(vanish)
    assert str(raised.value) == "HP702: rank 0 ended without a result"


def test_a_rank_that_hangs_is_ended_and_says_where() -> None:
    started = time.monotonic()
    with pytest.raises(RunError) as raised:
        run_ranks(2, hang_on_rank_one, timeout=10.0)
    assert "took too long" in str(raised.value)
    assert "hang_on_rank_one" in str(raised.value.__cause__) or "barrier" in str(raised.value.__cause__)
    assert time.monotonic() - started < HANG_S
