"""What a person sees while training: a live line on a terminal, a line now and then elsewhere, both in ``log.txt``."""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hp_trainer.files import writing
from hp_trainer.metrics import StepRecord

PLAIN_SECONDS = 5.0
RECENT_STEPS = 20  # whose mean is the pace that the time left is reckoned from


def progress_line(record: StepRecord, *, steps: int, held_out: float | None, eta: float) -> str:
    """Return the one line about ``record``; ``eta`` in seconds, ``held_out`` the latest held-out loss if there is one."""
    parts = [f"step {record.step}/{steps}", f"loss {record.loss:.4f}"]
    if held_out is not None:
        parts.append(f"held-out {held_out:.4f}")
    parts += [f"lr {record.lr:.2e}", f"norm {record.grad_norm:.2f}", f"{record.tokens_per_second:,.0f} tokens/s"]
    parts += [] if record.expert_imbalance is None else [f"imbalance {record.expert_imbalance:.2f}"]
    parts += [] if record.bias_move is None else [f"bias moved {record.bias_move:.1e}, largest {record.bias_size:.1e}"]
    return "  ".join([*parts, f"eta {timedelta(seconds=round(eta))}"])


class Progress:
    """Shows steps and messages, on one rank. A context manager.

    On a terminal the latest step is one line that is rewritten; otherwise a line is printed at most every five seconds, and
    for the first and the last step. ``log.txt`` gets the latter everywhere.
    """

    def __init__(self, directory: Path, *, steps: int) -> None:
        self._path = directory / "log.txt"
        self._steps = steps
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._stack = ExitStack()
        self._printed = 0.0
        self._held_out: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def __enter__(self) -> Progress:
        with writing(self._path):
            self._file = self._stack.enter_context(open(self._path, "a", encoding="utf-8"))
        if self._console.is_terminal:
            self._live = self._stack.enter_context(Live(console=self._console, auto_refresh=False, redirect_stderr=False))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with writing(self._path):
            self._stack.close()

    def message(self, text: str) -> None:
        """Print ``text`` above the live line, and log it."""
        self._log(text)
        self._console.print(text, markup=False)

    def step(self, record: StepRecord) -> None:
        """Show ``record`` as the state of the run."""
        self._held_out = self._held_out if record.eval_loss is None else record.eval_loss
        line = progress_line(record, steps=self._steps, held_out=self._held_out, eta=self._eta(record))
        if self._live:
            self._live.update(Text(line, no_wrap=True), refresh=True)
        if self._due(record):
            self._log(line)
            if not self._live:
                self._console.print(line, markup=False)

    def _eta(self, record: StepRecord) -> float:
        if record.step == 2:
            self._recent.clear()  # the first step is slow (new shapes) and says nothing about the others
        self._recent.append(record.seconds)
        return sum(self._recent) / len(self._recent) * (self._steps - record.step)

    def _due(self, record: StepRecord) -> bool:
        now = time.monotonic()
        due = record.step in (1, self._steps) or record.eval_loss is not None or now - self._printed >= PLAIN_SECONDS
        self._printed = now if due else self._printed
        return due

    def _log(self, text: str) -> None:
        with writing(self._path):
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._file.flush()
