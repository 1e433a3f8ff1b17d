"""A thousand mutated recipes: each is a recipe or one line that says what is wrong, never a traceback."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_core.errors import HPError
from hp_core.recipe.load import load_recipe, recipe_from_dict
from hp_core.recipe.schema import Recipe

BASE: dict[str, Any] = {
    "model": {"adapter": "demo", "dtype": "float32", "config": {"hidden_size": 64, "layers": [1, 2]}},
    "mesh": {"tp": 2, "dp_shard": -1, "sequence_parallel": True},
    "precision": {"compute": "bf16"},
    "recompute": {"mode": "full", "layers": [0, "model.*"]},
    "protocols": {"cp": "allgather", "ep": {"name": "dedup"}},
    "kernels": "auto",
    "overrides": [
        {"match": ["a", "b"], "replace": {"kind": "module", "implementation": "norm", "source_type": "N", "with": {"eps": 1}}},
        {"match": "c", "freeze": ["x"], "params": "auto"},
    ],
    "freeze": ["*.bias"],
    "loss": {"chunk": 8, "aux": {"kind": "hf", "coefficient": 0.0}},
    "train": {"steps": 3, "path": "x", "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}},
}
WEIRD = [
    *(None, True, False, 0, -1, 2**63, 2**64, 10**40, -(10**5000), 1.5, 1e308, float("inf"), float("nan")),
    *(
        "",
        "off",
        "1e-3",
        "1_0",
        "12:30",
        "~",
        "0x10",
        "ünïcödé",
        "\u2028",
        "\n",
        "a: b",
        "# x",
        "*x",
        "&x",
        "!!int 3",
        "<<",
        "=",
    ),
    *(
        "{",
        "9" * 5000,
        "\ud800",
        "\x00",
        "shard(1)",
        "shard(99999)",
        "a.b",
        "x" * 3000,
        "train",
        "demo",
        "norm",
        "2024-01-01",
        "?",
    ),
    *([], {}, [[]], [None], {"": 1}, {"a": {"b": {}}}, {"tp": "shard(0)"}),
]
TEXTS = [
    *(
        "\t",
        "\n",
        "  ",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "*a",
        "&a ",
        "!!str ",
        "---\n",
        "...\n",
        "%YAML 9.9\n",
        "|",
        ">",
    ),
    *(">", "? ", "#", "<<: ", "\x00", "\ufeff", "\u2028", "🦆", "mesh: {}\n", "\\", '"\\UFFFFFFFF"', "0" * 30, "\r", "@", "`"),
]


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value below ``data``."""
    members = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in members for found in ((*path, key), *paths(value, (*path, key)))]


def nested(depth: int) -> Any:
    """Return lists in mappings in lists, ``depth`` deep."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


VALUES = st.one_of(
    st.sampled_from(WEIRD),
    st.integers(0, 120).map(nested),
    st.text(max_size=8),
    st.integers(),
    st.floats(),
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=4), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    ),
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Return the base recipe with one to four values dropped, renamed, replaced, or moved to the top."""
    data = copy.deepcopy(BASE)
    for _ in range(draw(st.integers(1, 4))):
        *above, key = draw(st.sampled_from(paths(data) or [("model",)]))
        holder: Any = data
        for part in above:
            holder = holder[part]
        if isinstance(holder, list):
            holder[key] = draw(VALUES)
        else:
            change(draw, holder, key, top=data)
    return data


def change(draw: st.DrawFn, holder: dict[str, Any], key: str, *, top: dict[str, Any]) -> None:
    """Drop, rename, replace or move one key of a mapping."""
    value = holder.pop(key, None)
    action = draw(st.sampled_from(["drop", "rename", "move", "replace", "replace", "replace"]))
    if action == "replace":
        holder[key] = draw(VALUES)
    elif action == "rename":
        holder[draw(st.sampled_from([f"{key}s", key[:-1], "", "1", "a.b", "a\nb"]) | st.text(max_size=5))] = value
    elif action == "move":
        top[key] = value


@st.composite
def garbled(draw: st.DrawFn) -> str:
    """Return YAML text of a mutated recipe, and often with something cut out of it or put into it."""
    data = draw(mutated())
    style = draw(st.sampled_from(["block", "flow", "json"]))
    try:
        text = (
            json.dumps(data)
            if style == "json"
            else yaml.safe_dump(data, default_flow_style=style == "flow", allow_unicode=True)
        )
    except (ValueError, UnicodeEncodeError):  # an integer of 5,000 digits, half of a surrogate pair
        text = yaml.safe_dump(BASE)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        stop = start + draw(st.integers(0, 20))
        text = text[:start] + draw(st.sampled_from(TEXTS) | st.text(max_size=6)) + text[stop:]
    return text


def outcome(load: Callable[[], Recipe]) -> None:
    """Call ``load``: it returns a recipe that survives a round trip, or raises an error of one line."""
    line = ""
    try:
        recipe = load()
        assert recipe_from_dict(recipe.to_dict(), plugins=recipe.declarations) == recipe
    except HPError as error:
        line = error.line
    assert not line or line.isprintable()
    assert len(line) < 700


MANY = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@settings(MANY, max_examples=400)
@given(data=mutated())
def test_a_mutated_dict_is_a_recipe_or_one_line(plugins, data):
    outcome(lambda: recipe_from_dict(data, plugins=plugins))


@settings(MANY, max_examples=400)
@given(text=garbled())
def test_a_mutated_text_is_a_recipe_or_one_line(plugins, tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    outcome(lambda: load_recipe(path, plugins=plugins))


KEYS = ["mesh.tp", "a", "kernels", "freeze.0", "", "model.config.x", "overrides.0.match"]
SETS = st.tuples(st.sampled_from(KEYS), st.sampled_from(TEXTS) | st.text(max_size=12)).map("=".join) | st.text(max_size=9)


@settings(MANY, max_examples=200)
@given(sets=st.lists(SETS, max_size=3))
def test_mutated_sets_are_a_recipe_or_one_line(plugins, tmp_path_factory, sets):
    path = tmp_path_factory.getbasetemp() / "base.yaml"
    path.write_text(yaml.safe_dump({key: BASE[key] for key in ("model", "mesh", "freeze", "overrides")}))
    outcome(lambda: load_recipe(path, plugins=plugins, sets=sets))


def test_the_unmutated_recipe_loads(plugins):
    outcome(lambda: recipe_from_dict(BASE, plugins=plugins))
    assert recipe_from_dict(BASE, plugins=plugins).mesh.tp == 2


@pytest.mark.parametrize("depth", [10, 100, 3000])
def test_deep_nesting_never_exhausts_the_stack(plugins, tmp_path, depth):
    (tmp_path / "r.yaml").write_text("model: {adapter: demo, config: " + "[" * depth + "]" * depth + "}")
    outcome(lambda: load_recipe(tmp_path / "r.yaml", plugins=plugins))
