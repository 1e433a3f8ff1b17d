"""Stopping cleanly: a signal ends a run after the current step, and a job that has not made a step at once. Torch-free."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOP_FILE = "stop"  # in the launcher's folder: stop after the current step
LEAVE_FILE = "leave"  # leave at once
BEGUN_FILE = "begun"  # left by the ranks when they are about to make the first step
SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTHING_TRAINED = "before the first step: nothing was trained"
LOOK_S = 0.2  # how often a rank looks whether it is to leave at once


class StopRequest:
    """Whether this process was asked to stop.

    Until :meth:`begin` a request ends the process at once. From then on the first SIGTERM or SIGINT is a request to stop
    after the current step, and a second one ends the process. Under ``hp train`` the launcher owns Ctrl-C and leaves a file
    in ``control``; a launcher that is gone counts as a request too.
    """

    def __init__(self, *, control: Path | None) -> None:
        self._control = control
        self._parent = os.getppid()
        self._signalled = False
        self._begun = False

    def install(self) -> None:
        """Let a request end this process at once, without a word: the launcher says it."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN if self._control else signal.SIG_DFL)
        if self._control:
            threading.Thread(target=self._leave_when_asked, daemon=True).start()

    def begin(self) -> None:
        """From now on, finish the current step first."""
        self._begun = True
        signal.signal(signal.SIGTERM, self._on_signal)
        if self._control:
            (self._control / BEGUN_FILE).touch()
        else:
            signal.signal(signal.SIGINT, self._on_signal)

    @property
    def requested(self) -> bool:
        """True from the first request on."""
        return self._signalled or self._launcher_says(STOP_FILE)

    def _launcher_says(self, name: str) -> bool:
        return self._control is not None and ((self._control / name).exists() or os.getppid() != self._parent)

    def _leave_when_asked(self) -> None:
        """Also while the main thread waits for other ranks, where Python handles no signal."""
        assert self._control is not None
        while not (self._control / LEAVE_FILE).exists() and (self._begun or os.getppid() == self._parent):
            time.sleep(LOOK_S)
        os._exit(1)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """While active, SIGTERM and SIGINT raise KeyboardInterrupt, which says that nothing was trained."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(NOTHING_TRAINED)

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
