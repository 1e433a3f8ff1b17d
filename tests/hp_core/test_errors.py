"""The error tree: one line per error, one code per meaning, each used and documented."""

import pickle
import re
from pathlib import Path

import pytest

from hp_core import errors
from hp_core.errors import CODES, HPError, PlanError, suggest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("hp_core", "plugins", "hp_qwen3_moe") for path in (ROOT / folder).rglob("*.py")]
FAMILIES = {cls.family: cls for cls in HPError.__subclasses__()}


def error(**parts: str) -> HPError:
    """Return an error with ``parts``."""
    return PlanError("HP502", "num_experts (128) must be divisible by ep (48)", **parts)


@pytest.mark.parametrize(
    ("parts", "rest"),
    [
        ({}, ""),
        ({"expected": "a divisor"}, "; expected a divisor"),
        ({"where": "mesh: ep=48"}, ". mesh: ep=48"),
        ({"fix": "set mesh.ep"}, ". fix: set mesh.ep"),
        (
            {"expected": "a divisor", "where": "recipe.yaml:3", "fix": "set mesh.ep"},
            "; expected a divisor. recipe.yaml:3. fix: set mesh.ep",
        ),
    ],
)
def test_an_error_says_value_expectation_place_and_fix_in_one_line(parts: dict[str, str], rest: str) -> None:
    assert error(**parts).line == f"hp: error[HP502]: num_experts (128) must be divisible by ep (48){rest}"


def test_line_breaks_and_control_characters_become_spaces() -> None:
    found = PlanError("HP511", "a\r\n\tb\x1b[31mc\x00d\x7fe\x85f", where="g\u2028h\u2029i", fix="j\n")
    assert found.line == "hp: error[HP511]: a b [31mc d e f. g h i. fix: j"


def test_a_text_that_ends_a_sentence_gets_no_second_full_stop() -> None:
    found = errors.FoundError("HP101", "no adapter 'x'; did you mean 'y'?", where="recipe.yaml:3")
    assert found.line == "hp: error[HP101]: no adapter 'x'; did you mean 'y'? recipe.yaml:3"


def test_an_error_survives_the_way_to_another_process() -> None:
    found = pickle.loads(pickle.dumps(error(expected="a", where="b", fix="c")))
    assert type(found) is PlanError
    assert (found.line, str(found)) == (
        error(expected="a", where="b", fix="c").line,
        str(error(expected="a", where="b", fix="c")),
    )


def test_a_code_belongs_to_the_family_of_its_class() -> None:
    for code in CODES:
        assert FAMILIES[code[2]](code, "text").code == code
    with pytest.raises(AssertionError):
        PlanError("HP101", "text")


def test_the_tree_at_the_top_of_the_file_is_the_tree() -> None:
    drawn = re.findall(r"[|`]- (\w+) +(\d)xx", errors.__doc__ or "")
    assert drawn == [(cls.__name__, family) for family, cls in sorted(FAMILIES.items())]


@pytest.mark.parametrize(("name", "hint"), [("qwen3_mo", "; did you mean 'qwen3_moe'?"), ("zzz", ""), ("", "")])
def test_a_suggestion_is_the_closest_known_name_or_nothing(name: str, hint: str) -> None:
    assert suggest(name, ["deepseek_v3", "qwen3_moe"]) == hint


def test_every_code_is_raised_somewhere() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES if path.name != "errors.py")
    assert [code for code in CODES if f'"{code}"' not in text] == []


def test_every_code_that_is_raised_is_known() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert set(re.findall(r'"(HP\d{3})"', text)) <= set(CODES)


def test_every_code_is_described_in_one_sentence() -> None:
    assert all(re.fullmatch(r"[A-Z].*\.", meaning) for meaning in CODES.values())
    assert len(set(CODES.values())) == len(CODES)
    assert list(CODES) == sorted(CODES)


def test_every_code_has_its_place_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    assert page == errors.reference_page()
