"""The shield: what a plugin's code does to the process while it is listed is put back, so that it disturbs nobody else.

It is no sandbox: code that ends the process outright (``os._exit``, ``os.execv``, a crash in C) takes the command with it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from hp_core.plugins.streams import Streams

OBJECTS = ("modules", "path", "path_hooks", "argv", "excepthook", "displayhook", "unraisablehook")  # attributes of sys
SIGNALS = [number for number in signal.valid_signals() if number < 32]  # the others have no names: real-time signals
LISTS = ("path", "path_hooks", "argv")  # of these the content counts too


class Interrupts:
    """Tells a person's Ctrl-C, which ends the command, from a ``KeyboardInterrupt`` that the code in the block raises itself.

    So it does with SIGTERM where a command handles it. Code in the block may catch what the handler raises: on leaving the
    block it is raised all the same, and a bare Ctrl-C as ``KeyboardInterrupt(doing)``, which completes "interrupted ...".
    """

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self._raised: BaseException | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):
                with suppress(ValueError):  # only the main thread has signals; no other is interrupted
                    signal.signal(number, self._on_signal)
                    self._before[number] = handler
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(self._raised, KeyboardInterrupt) and not self._raised.args:
            raise KeyboardInterrupt(self.doing) from None
        if self._raised is not None:
            raise self._raised from None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            self._raised = error
            raise


class Shield:
    """While the block runs, a plugin's code may do anything; afterwards the process is as it was before.

    ``undone`` then says what was put back: streams, the current directory, environment variables, signal handlers, filters
    of warnings, and the lists and hooks of ``sys``. Modules that were imported stay.
    """

    def __init__(self, doing: str) -> None:
        self._interrupts = Interrupts(doing)
        self.undone: tuple[str, ...] = ()

    def __enter__(self) -> Shield:
        self._interrupts.__enter__()
        self._streams = Streams()
        self._sys = {name: getattr(sys, name) for name in OBJECTS}
        self._lists = {name: list(self._sys[name]) for name in LISTS}
        self._modules = dict(sys.modules)
        self._environ, self._variables = os.environ, dict(os.environ)
        self._folder = _current_folder()
        self._signals = {number: signal.getsignal(number) for number in SIGNALS}
        self._recursion = sys.getrecursionlimit()
        warnings: Any = sys.modules.get("warnings")
        self._warnings = (warnings, warnings.filters, list(warnings.filters)) if warnings is not None else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undone = tuple(self._put_back())
        self._interrupts.__exit__(kind, error, trace)

    def _put_back(self) -> Iterator[str]:
        yield from self._put_back_sys()
        yield from self._streams.put_back()
        if _current_folder() != self._folder and self._folder is not None:
            os.chdir(self._folder)
            yield "the current directory"
        if os.environ is not self._environ:
            os.environ = self._environ  # noqa: B003  # the very object, which knows the process's own environment
            yield "os.environ"
        if changed := _differing(dict(os.environ), self._variables):
            os.environ.clear()
            os.environ.update(self._variables)
            yield _named("environment variables", changed)
        yield from self._put_back_signals()
        yield from self._put_back_warnings()

    def _put_back_sys(self) -> Iterator[str]:
        """Put back ``sys.modules`` first: without it nothing can be imported."""
        now = sys.modules
        sys.modules = self._sys["modules"]
        gone = [name for name, module in self._modules.items() if sys.modules.get(name) is not module]
        sys.modules.update({name: self._modules[name] for name in gone})
        if now is not sys.modules:
            yield "sys.modules (every one of them)"
        elif gone:
            yield _named("sys.modules", gone)
        for name in OBJECTS[1:]:
            changed = getattr(sys, name, None) is not self._sys[name]
            setattr(sys, name, self._sys[name])
            if name in LISTS and self._sys[name] != self._lists[name]:
                self._sys[name][:], changed = self._lists[name], True
            if changed:
                yield f"sys.{name}"
        if sys.getrecursionlimit() != self._recursion:
            sys.setrecursionlimit(self._recursion)
            yield "the recursion limit"

    def _put_back_signals(self) -> Iterator[str]:
        changed = []
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) != handler:
                with suppress(ValueError):
                    signal.signal(number, handler)
                changed.append(signal.Signals(number).name)
        if changed:
            yield _named("signal handlers", changed)

    def _put_back_warnings(self) -> Iterator[str]:
        if self._warnings is None:
            return
        module, filters, content = self._warnings
        if module.filters is not filters or filters != content:
            module.filters = filters
            filters[:] = content
            _forget_cached_warnings(module)
            yield "filters of warnings"


def _forget_cached_warnings(module: Any) -> None:
    """Tell the module of warnings that its filters have changed; Pythons differ in the name of what does it."""
    for name in ("_filters_mutated", "_filters_mutated_lock_held"):
        if hasattr(module, name):
            getattr(module, name)()
            return


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def _differing(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    return [name for name in sorted({*now, *before}) if now.get(name) != before.get(name)]


def _named(what: str, names: list[str]) -> str:
    """Return ``"signal handlers (SIGTERM)"``, with up to three names."""
    more = "" if len(names) <= 3 else f" and {len(names) - 3} more"
    return f"{what} ({', '.join(names[:3])}{more})"
