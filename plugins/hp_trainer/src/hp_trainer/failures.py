"""From the remains of a failed job to the one error that says why. Torch-free.

Each rank that fails leaves a report; a rank that was killed leaves only its exit code. When one rank is gone, the others
fail in their next collective: those reports are consequences and are shown only if nothing better is known.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from hp_core.errors import HPError, RunError

SIGKILL_FIX = "if the system ran out of memory (dmesg tells), lower train.micro_batch_size or train.sequence_length"
LOST_SIGNS = ("connection closed", "connection reset", "connection refused", "broken pipe")
LATE_SIGNS = ("timed out", "timeout")
LOST_FIX = "look for how the other ranks ended: a kill leaves no message (dmesg tells if the system ran out of memory)"
_SOURCE_LINE = re.compile(r"\[\S+\.\w+:\d+\] ")  # where in the communication library's own source it was noticed


@attrs.frozen(kw_only=True)
class Report:
    """What a failing rank says: when (seconds since the epoch), what, and whether it is about the connection to others,
    and of these about one that did not answer in time.

    ``code`` and the four texts are those of an ``HPError``; a report without a code is about any other exception.
    """

    rank: int
    time: float
    what: str
    code: str = ""
    expected: str = ""
    where: str = ""
    fix: str = ""
    connection: bool = False
    timeout: bool = False
    traceback: str = ""


def report_of(error: BaseException, *, rank: int, time: float, traceback: str, connection: bool) -> Report:
    """Return the report about ``error``."""
    if isinstance(error, HPError):
        return Report(
            rank=rank,
            time=time,
            code=error.code,
            what=error.what,
            expected=error.expected,
            where=error.where,
            fix=error.fix,
            traceback=traceback,
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    what = first if first == type(error).__name__ else f"{type(error).__name__}: {first}"
    late = connection and any(sign in what.lower() for sign in LATE_SIGNS)
    return Report(rank=rank, time=time, what=what, connection=connection, timeout=late, traceback=traceback)


def write_report(report: Report, *, control: Path) -> None:
    """Leave ``report`` in ``control`` for the launcher."""
    (control / f"rank{report.rank}.json").write_text(json.dumps(attrs.asdict(report)), encoding="utf-8")


def read_reports(control: Path) -> list[Report]:
    """Return the reports in ``control``, earliest first; one that was cut off by a kill is left out."""
    reports = []
    for file in control.glob("rank*.json"):
        try:
            reports.append(Report(**json.loads(file.read_text(encoding="utf-8"))))
        except ValueError:
            continue
    return sorted(reports, key=lambda report: report.time)


def root_cause(reports: Sequence[Report], *, exits: Mapping[int, int], world: int, log: Path | None) -> HPError:
    """Return the error that explains a failed job of ``world`` ranks.

    ``exits``: rank to exit code of the ranks that ended or were ended (negative: a signal). ``log``: the file that holds
    tracebacks and output, if there is one. In this order: an ``HPError`` of a rank, a rank for which others waited in vain,
    a rank that was killed, another exception, a rank that ended without a word, a lost connection.
    """
    for report in reports:
        if report.code:
            return HPError(report.code, report.what, expected=report.expected, where=report.where, fix=report.fix)
    told = {report.rank for report in reports}
    exits = {rank: code for rank, code in exits.items() if code != -signal.SIGTERM} or exits  # the launcher ends the others so
    if reports and reports[0].timeout and (hung := [rank for rank in range(world) if rank not in told]):
        return _hung(hung, waited=reports[0], log=log)  # by now the launcher has killed them
    for rank, code in sorted(exits.items()):
        if code < 0 and rank not in told:
            return _killed(rank, number=-code)
    plain = [report for report in reports if not report.connection]
    for report in plain:
        return _failed(report, log=log)
    for rank, code in sorted(exits.items()):
        if code and rank not in told:
            return RunError("HP702", f"rank {rank} ended with exit code {code} and no message", where=_see("Its output", log))
    for report in reports:
        return _lost(report, log=log)
    return RunError("HP702", "the job ended and no rank says why", where=_see("What was printed", log))


def _killed(rank: int, *, number: int) -> HPError:
    name = signal.Signals(number).name
    return RunError("HP702", f"rank {rank} was killed by {name}", fix=SIGKILL_FIX if number == signal.SIGKILL else "")


def _failed(report: Report, *, log: Path | None) -> HPError:
    return RunError("HP702", f"rank {report.rank} failed: {report.what}", where=_see("The traceback", log))


def _hung(ranks: Sequence[int], *, waited: Report, log: Path | None) -> HPError:
    """Return the error about ranks that did not take part in what ``waited`` waited for."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
    what = _SOURCE_LINE.sub("", waited.what)
    text = f"{who} hung: rank {waited.rank} waited for it in vain ({what})"
    return RunError("HP702", text, where=_see("What the others were doing", log))


def _lost(report: Report, *, log: Path | None) -> HPError:
    """Return the error for a job of which only consequences are known: the rank that reports is not the one to blame."""
    what = _SOURCE_LINE.sub("", report.what)
    sign = next((sign for sign in LOST_SIGNS if sign in what.lower()), None)
    if sign is None:
        return _failed(attrs.evolve(report, what=what), log=log)
    what = f"another rank was lost: rank {report.rank} has no connection to it any more ({sign})"
    return RunError("HP702", what, where=_see("The traceback", log), fix=LOST_FIX)


def _see(what: str, log: Path | None) -> str:
    return f"{what} is in {log}" if log else ""
