"""Which of several failures is the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.errors import RunError
from hp_trainer.failures import Report, read_reports, report_of, root_cause, write_report

LOG = Path("run/log.txt")
LOST = Report(rank=0, time=1.0, what="RuntimeError: Connection closed by peer", connection=True)
LATER = Report(rank=2, time=9.0, what="HP710's text", code="HP710", expected="e", where="w", fix="f")
BUG = Report(rank=3, time=2.0, what="KeyError: 'x'")


@pytest.mark.parametrize(
    ("reports", "exits", "line"),
    [
        ([LOST, BUG, LATER], {1: -9}, "hp: error[HP710]: HP710's text; expected e. w. fix: f"),
        (
            [LOST, BUG],
            {0: 1, 1: -9},
            "hp: error[HP702]: rank 1 was killed by SIGKILL. fix: if the system ran out of memory (dmesg tells), lower"
            " train.micro_batch_size or train.sequence_length",
        ),
        ([LOST], {0: 1, 1: -11}, "hp: error[HP702]: rank 1 was killed by SIGSEGV"),
        ([], {0: -15, 1: -6}, "hp: error[HP702]: rank 1 was killed by SIGABRT"),  # the launcher ended rank 0 for it
        ([], {0: -15, 1: -15}, "hp: error[HP702]: rank 0 was killed by SIGTERM"),
        ([LOST, BUG], {0: 1, 3: 1}, "hp: error[HP702]: rank 3 failed: KeyError: 'x'. The traceback is in run/log.txt"),
        ([LOST], {0: 1, 2: 7}, "hp: error[HP702]: rank 2 ended with exit code 7 and no message. Its output is in run/log.txt"),
        (
            [LOST],
            {0: 1},
            "hp: error[HP702]: another rank was lost: rank 0 has no connection to it any more (connection closed). The"
            " traceback is in run/log.txt. fix: look for how the other ranks ended: a kill leaves no message (dmesg tells if"
            " the system ran out of memory)",
        ),
        ([], {}, "hp: error[HP702]: the job ended and no rank says why. What was printed is in run/log.txt"),
    ],
)
def test_the_cause_is_told_and_the_consequences_are_not(reports: list[Report], exits: dict[int, int], line: str) -> None:
    assert root_cause(reports, exits=exits, world=4, log=LOG).line == line


def test_a_lost_connection_blames_another_rank_without_the_library_s_source_line() -> None:
    error = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection reset by peer [127.0.0.1]:3")
    report = report_of(error, rank=1, time=0.0, traceback="", connection=True)
    assert root_cause([report], exits={}, world=2, log=None).line == (
        "hp: error[HP702]: another rank was lost: rank 1 has no connection to it any more (connection reset)."
        " fix: look for how the other ranks ended: a kill leaves no message (dmesg tells if the system ran out of memory)"
    )


LATE = RuntimeError("[/pytorch/gloo/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete")


def late(*ranks: int) -> list[Report]:
    """Return the reports of ranks that waited too long."""
    return [report_of(LATE, rank=rank, time=float(rank), traceback="", connection=True) for rank in ranks]


@pytest.mark.parametrize(
    ("reports", "exits", "text"),
    [
        (late(0, 2, 3), {0: 1, 1: -9}, "rank 1 hung: rank 0 waited for it in vain (RuntimeError: Timed out waiting 1000ms"),
        (late(1), {0: -15, 1: 1}, "one of the ranks 0, 2, 3 hung: rank 1 waited for it in vain (RuntimeError: Timed out"),
        (late(0, 1, 2, 3), {0: 1}, "rank 0 failed: RuntimeError: Timed out waiting 1000ms for recv operation to complete."),
    ],
)
def test_a_rank_that_hangs_is_blamed_and_not_those_that_waited_for_it(
    reports: list[Report], exits: dict[int, int], text: str
) -> None:
    assert root_cause(reports, exits=exits, world=4, log=LOG).line.startswith(f"hp: error[HP702]: {text}")


def test_reports_survive_their_file_and_come_back_in_the_order_of_time(tmp_path: Path) -> None:
    for report in (LATER, LOST, BUG):
        write_report(report, control=tmp_path)
    (tmp_path / "rank7.json").write_text('{"rank": 7, "ti')
    assert read_reports(tmp_path) == [LOST, BUG, LATER]


def test_a_report_keeps_the_parts_of_an_error() -> None:
    error = RunError("HP711", "too short", expected="more", where="here", fix="add")
    report = report_of(error, rank=1, time=0.0, traceback="", connection=False)
    assert root_cause([report], exits={}, world=2, log=LOG).line == error.line


def test_a_report_of_another_exception_is_its_first_line() -> None:
    assert report_of(ValueError("a\nb"), rank=0, time=0.0, traceback="", connection=False).what == "ValueError: a"
    assert report_of(KeyboardInterrupt(), rank=0, time=0.0, traceback="", connection=False).what == "KeyboardInterrupt"
