"""The reference page of the recipe says what the schema says."""

import re
from pathlib import Path

import pytest

from hp_core.errors import HPError
from hp_core.recipe.reference import Row, rows
from hp_core.recipe.schema import Recipe
from hp_core.recipe.unsupported import REFUSED

PAGE = Path(__file__).parents[3] / "docs/reference/recipe.md"
TRAINER = {"train": "Train", "data": "Data", "checkpoint": "Checkpoint", "run": "Run"}


def documented() -> dict[str, Row]:
    """Return the rows of the page's tables by key."""
    found = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len({row[0] for row in found}) == len(found)
    return {row[0]: Row(key=row[0], kind=row[1], default=row[2], meaning=row[3]) for row in found}


def test_the_page_has_every_key_of_the_core_with_type_default_and_meaning():
    expected = {row.key: row for row in rows(Recipe, prefix="")}
    assert all(row.meaning for row in expected.values())
    assert {key: row for key, row in documented().items() if key.split(".")[0] not in TRAINER} == expected


def test_the_page_has_every_key_of_the_trainer_with_type_and_default():
    sections = pytest.importorskip("hp_trainer.sections")
    for name, cls in TRAINER.items():
        expected = [(row.key, row.kind, row.default) for row in rows(getattr(sections, cls), prefix=name)]
        page = [(row.key, row.kind, row.default) for row in documented().values() if row.key.split(".")[0] == name]
        assert page == expected


def test_the_page_lists_what_is_not_implemented():
    table = PAGE.read_text(encoding="utf-8").partition("## Not implemented")[2]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == [refusal.key for refusal in REFUSED]


def test_the_messages_on_the_page_are_what_is_printed(load):
    texts = ["mesh:\n\n  tpp: 2", "mesh:\n\n  tp: two", "mesh:\n\n  pp: 2"]
    printed = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("hp: error")]
    for text, line in zip(texts, printed, strict=True):
        with pytest.raises(HPError) as caught:
            load(text)
        assert caught.value.line == line


def test_members_of_lists_are_documented_below_a_star():
    assert "overrides.*.replace.with" in [row.key for row in rows(Recipe, prefix="")]
