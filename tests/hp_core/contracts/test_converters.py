"""Converters refuse what Python would take apart in silence."""

from collections.abc import Callable
from typing import Any

import pytest

from hp_core.contracts.converters import as_dict, as_patterns, as_tuple
from hp_core.errors import DeclarationError


def test_values_are_taken_as_they_come() -> None:
    assert as_tuple(["a", "b"]) == as_tuple(word for word in "ab") == ("a", "b")
    assert (as_patterns("layers.*"), as_patterns(["a"])) == (("layers.*",), ("a",))
    assert as_dict({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("convert", "value", "told"),
    [
        (as_tuple, "norm", "the text 'norm' stands for a list; expected ('norm',)"),
        (as_tuple, 3, "3 stands for a list; expected a tuple or a list"),
        (as_patterns, None, "None stands for a list; expected a tuple or a list"),
        (as_dict, ["eps"], "['eps'] stands for a mapping; expected a dict"),
        (as_dict, ["eps"] * 40, "a list stands for a mapping; expected a dict"),
    ],
)
def test_another_value_is_refused(convert: Callable[[Any], Any], value: Any, told: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        convert(value)
    assert caught.value.line == f"hp: error[HP402]: {told}"
