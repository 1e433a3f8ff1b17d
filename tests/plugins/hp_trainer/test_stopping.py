"""Requests to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.testing.patience import HANG_S
from hp_trainer.stopping import LEAVE_FILE, STOP_FILE, StopRequest

COUNT = """
import time
from hp_trainer.stopping import StopRequest
stop = StopRequest(control=None)
stop.install()
stop.begin()
print("ready", flush=True)
while not stop.requested:
    time.sleep(0.01)
print("stopping", flush=True)
time.sleep(60)
"""


def test_the_launchers_file_is_a_request(tmp_path: Path) -> None:
    stop = StopRequest(control=tmp_path)
    assert not stop.requested
    (tmp_path / STOP_FILE).touch()
    assert stop.requested


def test_without_a_launcher_nothing_is_requested() -> None:
    assert not StopRequest(control=None).requested


def test_the_first_signal_is_a_request_and_the_second_ends_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", COUNT], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "stopping\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=HANG_S) == -signal.SIGINT


LOOK = """
import pathlib, sys, time
from hp_trainer.stopping import StopRequest
stop = StopRequest(control=pathlib.Path(sys.argv[1]) if sys.argv[1:] else None)
stop.install()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_first_step_a_signal_ends_a_process_without_a_launcher(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LOOK], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        assert child.wait(timeout=HANG_S) == -number


def test_before_the_first_step_the_launcher_alone_decides_about_ctrl_c(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", LOOK, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        (tmp_path / LEAVE_FILE).touch()
        assert child.wait(timeout=HANG_S) == 1


def test_a_launcher_that_is_gone_is_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest(control=tmp_path)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.requested
