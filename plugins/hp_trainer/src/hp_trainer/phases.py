"""What a job does before its first line of progress, said at once: on a busy machine that takes a minute. Torch-free."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print ``hp: TEXT`` on standard error now."""
    print(f"hp: {text}", file=sys.stderr, flush=True)
