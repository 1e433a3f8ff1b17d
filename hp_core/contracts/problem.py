"""Problem: one finding of an additive check; the core turns it into an error."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Problem:
    """What is wrong (``what``), what was expected, where (an FQN or a recipe path) and the fix.

    ``code`` is the error code when it is not the check's own, e.g. ``"HP502"`` for a divisibility that a configuration
    check finds.
    """

    what: str
    expected: str = ""
    where: str = ""
    fix: str = ""
    code: str | None = None
