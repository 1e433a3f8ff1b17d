"""Version ranges agree with packaging, which they avoid importing."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from hp_core.contracts.ranges import fits, is_range

versions = st.lists(st.integers(0, 12), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
clauses = st.tuples(st.sampled_from([">=", "<=", "==", "!=", ">", "<"]), versions).map("".join)


@given(versions, st.lists(clauses, max_size=3).map(",".join))
def test_plain_releases_compare_as_packaging_says(found: str, asked: str) -> None:
    assert is_range(asked)
    assert fits(found, asked=asked) == SpecifierSet(asked).contains(found, prereleases=True)


@pytest.mark.parametrize(
    ("found", "asked", "expected"),
    [
        ("2.13.0+cpu", ">=2.13", True),
        ("3.0rc1", ">=2", True),
        ("5.24.0", "~=5.20", True),
        ("1.4", "==1.*", True),
        ("1", "", True),
    ],
)
def test_unusual_versions_and_ranges_are_left_to_packaging(found: str, asked: str, expected: bool) -> None:
    assert fits(found, asked=asked) is expected


@pytest.mark.parametrize("asked", [">= 5.20, < 6", "~=1.0", "==1.*", "!=2,>1", ""])
def test_what_packaging_accepts_is_a_range(asked: str) -> None:
    assert is_range(asked)


@pytest.mark.parametrize("asked", ["5.20", "latest", ">=", None, 5, "=>1"])
def test_anything_else_is_no_range(asked: object) -> None:
    assert not is_range(asked)


def test_plain_ranges_do_not_import_packaging() -> None:
    code = (
        "import sys; from hp_core.contracts.ranges import fits; fits('1.2', asked='>=1,<2'); print('packaging' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
