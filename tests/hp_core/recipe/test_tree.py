"""The tree: what YAML means, where each value was written, and what is refused before any schema is looked at."""

import math
from pathlib import Path

import pytest

from hp_core.errors import HPError
from hp_core.recipe.tree import join, node_of, parse_yaml, scalar

BASE = Path("/base")


def parse(text):
    return parse_yaml(text, where=lambda line: f"r:{line}", base=BASE)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("12", 12),
        ("-3", -3),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("1.2.3", "1.2.3"),
        ("\u0661", "\u0661"),
    ],
)
def test_a_plain_scalar_means_what_yaml_1_2_says(text, value):
    found = scalar(text)
    assert (found, type(found)) == (value, type(value))


def test_a_quoted_scalar_is_always_a_string():
    assert parse("a: '1'\nb: \"true\"\nc: |\n  null").plain() == {"a": "1", "b": "true", "c": "null"}


def test_a_value_lies_where_its_key_does_and_an_item_on_its_own_line():
    tree = parse("a:\n  b:\n    c: 1\n  d:\n    - 2\n    - {e: 3}\n")
    places = {path: tree.find(path).where for path in ("a", "a.b", "a.b.c", "a.d", "a.d.0", "a.d.1", "a.d.1.e")}
    assert places == {"a": "r:1", "a.b": "r:2", "a.b.c": "r:3", "a.d": "r:4", "a.d.0": "r:5", "a.d.1": "r:6", "a.d.1.e": "r:6"}


def test_what_is_not_there_lies_where_the_section_above_it_does():
    tree = parse("x: 1\na:\n  b: 2")
    assert [tree.find(path).where for path in ("a.z", "a.b.z", "q", "")] == ["r:2", "r:3", "r:1", "r:1"]


def test_keys_are_taken_as_text():
    assert parse("1: a\ntrue: b\n~: c").plain() == {"1": "a", "true": "b", "~": "c"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "HP511: not valid YAML: expected ',' or ']', but got '<stream end>'. r:1"),
        ("a: 1\n b: 2", "HP511: not valid YAML: mapping values are not allowed here. r:2"),
        ("a:\n\t- 1", "HP511: not valid YAML: found character '\\t' that cannot start any token. r:2"),
        ("a: \x00", "HP511: not valid YAML: special characters are not allowed. r:1"),
        ('a: "\\UFFFFFFFF"', "HP511: not valid YAML: a number or an escape is out of range. r:1"),
        ('a: "\\ud800"', "HP511: not valid YAML: a string holds half of a surrogate pair. r:1"),
        ("a: &x 1", "HP511: not valid YAML: anchors and aliases are not supported. r:1. fix: write the value out"),
        ("a: *x", "HP511: not valid YAML: anchors and aliases are not supported. r:1. fix: write the value out"),
        (
            "a: !!python/object:os.system {}",
            "HP511: not valid YAML: the tag tag:yaml.org,2002:python/object:os.system is not supported. r:1. "
            "fix: write the value without a tag",
        ),
        ("a: 1\n---\nb: 2", "HP511: not valid YAML: a second document starts here; expected one document. r:3"),
        ("? [a]\n: b", "HP511: not valid YAML: a key is a list or a mapping; expected a string. r:1"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "HP517: the key 'b.c' occurs twice, first at r:3. r:4. fix: remove one of them"),
        ("a: [0, 0xFFFFFFFFFFFFFFFFFF]", "HP514: a.1 is '0xFFFFFFFFFFFFFFFFFF'; expected an integer of at most 64 bits. r:1"),
        ("a: " + "9" * 5000, f"HP514: a is '{'9' * 56}...; expected an integer of at most 64 bits. r:1"),
        ("[" * 33, "HP511: not valid YAML: nested deeper than 32 levels. r:1"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(text, message):
    with pytest.raises(HPError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_deep_nesting_is_refused_before_it_can_exhaust_the_stack():
    with pytest.raises(HPError, match="nested deeper"):
        parse("{a: " * 10_000 + "1" + "}" * 10_000)


def test_plain_data_becomes_the_same_tree():
    data = {"a": [1, {"b": None}], "c": 0.5}
    assert node_of(data, base=BASE).plain() == data
    assert node_of({"p": Path("x/y"), "t": (1, 2)}, base=BASE).plain() == {"p": "x/y", "t": [1, 2]}
    assert node_of(data, base=BASE).find("a.1.b").where == "recipe: a.1.b"


def test_plain_data_that_a_recipe_cannot_hold_is_refused():
    cases = {
        "HP513: a is of type object; expected plain data. recipe: a": {"a": object()},
        "HP513: a key of a is 1; expected a string. recipe: a": {"a": {1: 2}},
        "HP514: a has 65 bits; expected an integer of at most 64 bits. recipe: a": {"a": 2**64},
        "HP514: a holds half of a surrogate pair; expected text. recipe: a": {"a": "\ud800"},
    }
    for message, data in cases.items():
        with pytest.raises(HPError) as caught:
            node_of(data, base=BASE)
        assert str(caught.value) == message


def test_a_cycle_in_plain_data_is_refused():
    data: dict = {}
    data["a"] = data
    with pytest.raises(HPError, match="HP511: nested deeper than 32 levels"):
        node_of(data, base=BASE)


def test_a_key_with_a_line_break_stays_on_one_line():
    assert join("a", "b\nc") == "a.b\\nc"
