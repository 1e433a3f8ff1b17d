"""Cells and mutations are measured together, job by job, before the first test that asks for one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_core.testing.equivalence import References

sys.path.insert(0, str(Path(__file__).parent))  # the tables of cells and mutations are modules beside the tests


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The folder of references, shared by all tests of the session."""
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="session")
def selected(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """Return the values of a parametrised argument over the tests of this session, each once, in order."""

    def values(argument: str) -> list[Any]:
        found = [item.callspec.params.get(argument) for item in request.session.items if hasattr(item, "callspec")]
        return list({id(value): value for value in found if value is not None}.values())

    return values
