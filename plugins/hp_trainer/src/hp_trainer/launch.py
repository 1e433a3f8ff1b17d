"""Starting the ranks of a job on this machine with torch elastic, and turning their end into one result."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hp_core.errors import RunError
from hp_trainer.failures import read_reports, root_cause
from hp_trainer.stopping import BEGUN_FILE, LEAVE_FILE, NOTHING_TRAINED, SIGNALS, STOP_FILE
from hp_trainer.variables import set_defaults

HOST = "127.0.0.1"
SHUTDOWN_SECONDS = 5  # between SIGTERM and SIGKILL for the ranks that are left when one has failed
LOG_TAIL = 4000  # characters of a rank's own output that go to log.txt when it fails


def launch(arguments: Sequence[str], *, nproc: int, port: int, directory: Path, device: str = "cpu") -> None:
    """Run ``python -m hp_trainer.rank ARGUMENTS`` as ``nproc`` ranks and wait for them.

    ``port`` 0 takes a free one. The ranks' threads share the cores unless OMP_NUM_THREADS is set; on CPUs they get the
    variables of :mod:`hp_trainer.variables`. SIGTERM or SIGINT asks them to stop after the current step; a second one, or one
    before the first step, ends them at once.

    Raises:
        HPError: the one reason why the job failed (HP702 a rank died, or the error of a rank); by then no rank is left.
        KeyboardInterrupt: it was stopped before the first step; by then no rank is left.
    """
    control = Path(tempfile.mkdtemp(prefix="hp-train-"))
    try:
        with _stop_file_on_signals(control), _quiet_elastic():
            set_defaults(device=device)
            os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc)))
            command = ["-m", "hp_trainer.rank", *arguments, "--control", str(control)]
            elastic_launch(_config(nproc, port=port, logs=control / "logs"), sys.executable)(*command)
        _check_not_left(control)
    except ChildFailedError as error:
        _check_not_left(control)
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        _keep_traces(control, exits=exits, log=directory / "log.txt")
        raise root_cause(read_reports(control), exits=exits, world=nproc, log=directory / "log.txt") from error
    except SignalException as error:
        _check_not_left(control)
        raise RunError("HP702", "the job was ended by a second signal, in the middle of a step") from error
    finally:
        shutil.rmtree(control, ignore_errors=True)


def check_port(port: int) -> None:
    """Raise HP703 if something listens on ``port`` of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise RunError("HP703", f"port {port} is in use", fix="choose another --port, or none for a free one") from error


def threads_per_rank(nproc: int) -> int:
    """Return how many threads each of ``nproc`` ranks gets: an equal share of the cores this process may use, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // nproc, 1)


def _config(nproc: int, *, port: int, logs: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HOST}:{port}",
        local_addr=HOST,
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGHUP,SIGQUIT",  # SIGTERM and SIGINT are a request to stop, not to die
        shutdown_timeout=SHUTDOWN_SECONDS,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs), redirects={rank: Std.ALL if rank else Std.NONE for rank in range(nproc)}
        ),
    )


@contextmanager
def _stop_file_on_signals(control: Path) -> Iterator[None]:
    """While active, the first SIGTERM or SIGINT leaves a file for the ranks, the second raises in elastic's own way."""
    stop, leave, begun = (control / name for name in (STOP_FILE, LEAVE_FILE, BEGUN_FILE))

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.exists() or leave.exists():
            leave.touch()
            raise SignalException("a second signal", sigval=signal.SIGTERM)
        if begun.exists():
            stop.touch()
            os.write(2, b"hp: stopping after the current step; once more stops at once\n")
        else:  # raising here could lose a process that is just being started
            leave.touch()

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_not_left(control: Path) -> None:
    if (control / LEAVE_FILE).exists() and not (control / BEGUN_FILE).exists():
        raise KeyboardInterrupt(NOTHING_TRAINED) from None


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep elastic's own tables about failed ranks off the terminal: the launcher says it in one line."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", *names)]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def _keep_traces(control: Path, *, exits: Mapping[int, int], log: Path) -> None:
    """Append tracebacks and the failed ranks' own last output to ``log``; a disk that is full loses them."""
    parts = [f"rank {report.rank}: {report.traceback}" for report in read_reports(control)]
    for file in sorted((control / "logs").rglob("stderr.log")):
        text = file.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        if text and int(file.parent.name) in exits:
            parts.append(f"rank {file.parent.name} printed: {text}")
    try:
        with open(log, "a", encoding="utf-8") as out:
            out.writelines(f"{part}\n" for part in parts)
    except OSError:
        return
