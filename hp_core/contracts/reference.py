"""The form of a lazy reference, ``"package.module:Attribute"``: how declarations name code without importing it."""

from __future__ import annotations

import re

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_wellformed(reference: object) -> bool:
    """Return whether ``reference`` is text of the form ``"package.module:Attribute"``."""
    return isinstance(reference, str) and _FORM.fullmatch(reference) is not None
