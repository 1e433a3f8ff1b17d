"""Version ranges such as ``">=5.20,<6"``, without importing packaging for the common ones."""

from __future__ import annotations

import re

_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)\s*(?:,|$)")
_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_HOLDS = {
    ">=": lambda found, asked: found >= asked,
    "<=": lambda found, asked: found <= asked,
    "==": lambda found, asked: found == asked,
    "!=": lambda found, asked: found != asked,
    ">": lambda found, asked: found > asked,
    "<": lambda found, asked: found < asked,
}


def is_range(asked: object) -> bool:
    """Return whether ``asked`` is a version range as packaging metadata writes it; ``""`` allows every version."""
    if not isinstance(asked, str):
        return False
    if _is_simple(asked):
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(asked)
    except InvalidSpecifier:
        return False
    return True


def fits(found: str, *, asked: str) -> bool:
    """Return whether version ``found`` lies in the range ``asked``; pre-releases count.

    Plain releases in plain ranges are compared here: importing packaging takes longer than listing all plugins.
    """
    if _RELEASE.fullmatch(found) and _is_simple(asked):
        return all(_HOLDS[sign](*_padded(found, version)) for sign, version in _CLAUSE.findall(asked))
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(asked).contains(found, prereleases=True)


def _is_simple(asked: str) -> bool:
    return not _CLAUSE.sub("", asked).strip()


def _padded(first: str, second: str) -> tuple[list[int], list[int]]:
    one, two = ([int(part) for part in version.split(".")] for version in (first, second))
    length = max(len(one), len(two))
    return one + [0] * (length - len(one)), two + [0] * (length - len(two))
