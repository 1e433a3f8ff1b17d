"""The operators of torch_npu by their own schemas, computed on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the schemas and the operators are modules beside the tests

from npu_operators import CALLS, Calls, registered


@pytest.fixture(scope="session")
def _namespace() -> Iterator[None]:
    """Register the namespace once."""
    with registered():
        yield


@pytest.fixture
def npu(_namespace: None) -> Calls:
    """What the kernels call, from the start of the test: operator and keywords of every call."""
    CALLS.clear()
    return CALLS
