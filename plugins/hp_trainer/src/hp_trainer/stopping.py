"""Stopping cleanly: a signal, or the launcher's stop file, ends the run after the current step. Torch-free."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

STOP_FILE = "stop"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether this process was asked to stop.

    The first SIGTERM or SIGINT is a request, a second one ends the process. Under ``hp train`` the launcher owns the
    signals and leaves a file named ``stop`` in ``control``; a launcher that is gone counts as a request too.
    """

    def __init__(self, *, control: Path | None) -> None:
        self._file = control / STOP_FILE if control else None
        self._parent = os.getppid()
        self._signalled = False

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    @property
    def requested(self) -> bool:
        """True from the first request on."""
        if self._signalled or self._file is None:
            return self._signalled
        return self._file.exists() or os.getppid() != self._parent

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
