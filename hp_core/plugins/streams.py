"""Standard input, output and error of the process, remembered so that they can be put back when somebody closes them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

NAMES = ("stdin", "stdout", "stderr")  # the place of each is its descriptor
WORDS = ("standard input", "standard output", "standard error")


class Streams:
    """The three streams as they are now."""

    def __init__(self) -> None:
        self._streams = {name: getattr(sys, name) for name in (*NAMES, *(f"__{name}__" for name in NAMES))}
        self._kept = {place: os.dup(place) for place in range(3) if _identity(place) is not None}
        self._settings = {name: _settings(stream) for name, stream in self._streams.items()}

    def put_back(self) -> Iterator[str]:
        """Put back the streams and their descriptors and yield which were changed; call it once."""
        for place, name in enumerate(NAMES):
            changed = self._put_back_descriptor(place)
            for attribute in (name, f"__{name}__"):
                stream = self._streams[attribute]
                changed |= getattr(sys, attribute, None) is not stream
                if _is_closed(stream) and self._settings[attribute] is not None and place in self._kept:
                    stream, changed = self._reopened(attribute, place), True
                setattr(sys, attribute, stream)
            if changed:
                yield WORDS[place]
        for descriptor in self._kept.values():
            os.close(descriptor)

    def _put_back_descriptor(self, place: int) -> bool:
        kept = self._kept.get(place)
        if kept is None or _identity(place) == _identity(kept):
            return False
        os.dup2(kept, place)
        return True

    def _reopened(self, attribute: str, place: int) -> Any:
        """Return a new stream for a closed one; ``sys.stdout`` and ``sys.__stdout__`` stay one object if they were."""
        for other, stream in self._streams.items():
            if stream is self._streams[attribute] and other != attribute and not _is_closed(getattr(sys, other)):
                return getattr(sys, other)
        return open(place, "r" if place == 0 else "w", closefd=False, **(self._settings[attribute] or {}))


def _identity(descriptor: int) -> tuple[int, int, int] | None:
    """Return what a descriptor leads to, or None if it is closed."""
    with suppress(OSError):
        found = os.fstat(descriptor)
        return found.st_dev, found.st_ino, found.st_rdev
    return None


def _settings(stream: Any) -> dict[str, Any] | None:
    """Return how to open a stream again; None for one that is no open text file of the process, such as a test's."""
    with suppress(AttributeError, OSError, ValueError):
        stream.fileno()
        return {"encoding": stream.encoding, "errors": stream.errors, "buffering": 1 if stream.line_buffering else -1}
    return None


def _is_closed(stream: Any) -> bool:
    try:
        return bool(getattr(stream, "closed", False))
    except ValueError:  # detached from its buffer
        return True
