"""Overrides: replacements and freezing load; what contradicts itself or names nothing is refused."""

import pytest

from hp_core.contracts import Partial, Replicate, Shard
from hp_core.errors import HPError
from hp_core.recipe.overrides import Override, Replace
from hp_core.recipe.values import IllegalValueError

NORM = "replace: {kind: module, implementation: norm, source_type: RMSNorm"


def test_a_replacement_is_typed(load):
    recipe = load(f"overrides:\n  - match: model.*.norm\n    {NORM}, with: {{eps: 1, gemm: grouped}}}}")
    replace = Replace(kind="module", implementation="norm", source_type="RMSNorm", arguments={"eps": 1.0, "gemm": "grouped"})
    assert recipe.overrides == (Override(match="model.*.norm", replace=replace),)
    assert type(recipe.overrides[0].replace.arguments["eps"]) is float


def test_several_patterns_replace_modules(load):
    assert load(f"overrides: [{{match: [a, b], {NORM}}}}}]").overrides[0].match == ("a", "b")


def test_frozen_patterns_of_overrides_lie_below_their_modules(load):
    recipe = load("freeze: ['*.bias']\noverrides: [{match: model.layers.0, freeze: [mlp.*]}]")
    assert recipe.frozen == ("*.bias", "model.layers.0.mlp.*")


def test_layouts_are_typed_although_nothing_uses_them_yet(load):
    layouts = {"o.weight": {"tp": Shard(1)}, "q": {"tp": Partial(), "cp": Replicate()}, "n": {}, "i": "auto"}
    with pytest.raises(HPError) as caught:
        load(
            "overrides:\n  - match: a\n    params: {o.weight: {tp: shard(1)}, q: {tp: partial, cp: replicate}, n: {}, i: auto}"
        )
    assert str(caught.value) == (
        "HP515: overrides.0.params is a mapping, but changing layouts is not implemented in this version; expected auto. "
        "recipe.yaml:4"
    )
    assert Override(match="a", params=layouts).params == layouts


MISTAKES = {
    "match: a": "overrides.0.match is 'a'; expected something to change beside it, such as replace or freeze. recipe.yaml:3",
    "match: []": "overrides.0.match is an empty list; expected something that is not empty. recipe.yaml:3",
    "match: [a, b]\n    freeze: [x]": (
        "overrides.0.match is ['a', 'b']; expected one pattern; a list needs replace: {kind: module}. recipe.yaml:3"
    ),
    "match: a\n    freeze: ['']": "overrides.0.freeze is ['']; expected patterns that are not empty. recipe.yaml:4",
    f"match: a\n    when: cp\n    {NORM}}}": (
        "overrides.0.when is 'cp'; expected null, since replacing a module never depends on the mesh. recipe.yaml:4"
    ),
    "match: a\n    params: {w: {tp: shard(x)}}": (
        "overrides.0.params.w.tp is 'shard(x)'; expected shard(N), replicate or partial. recipe.yaml:4"
    ),
    "match: a\n    params: {w: {tp: 1}}": (
        "overrides.0.params.w.tp is 1 (an integer); expected shard(N), replicate or partial. recipe.yaml:4"
    ),
    "match: a\n    params: {w: {dp: shard(1)}}": (
        "unknown key 'overrides.0.params.w.dp'; expected one of cp, ep, tp. recipe.yaml:4"
    ),
    "match: a\n    params: all": "overrides.0.params is 'all'; expected auto or a mapping. recipe.yaml:4",
    "match: a\n    replace: {kind: module, implementation: norm}": (
        "overrides.0.replace.source_type is null; expected the class name of the modules to replace. recipe.yaml:4"
    ),
    "match: a\n    replace: {kind: module, implementation: os.system, source_type: X}": (
        "overrides.0.replace.implementation is 'os.system'; expected the name of a registered family, since a recipe cannot "
        "name code to import. recipe.yaml:4"
    ),
    "match: a\n    replace: {kind: module, implementation: nrom, source_type: X}": (
        "no installed plugin provides the family 'nrom'; did you mean 'norm'? recipe.yaml:4"
    ),
    f"match: a\n    {NORM}, with: {{esp: 1}}}}": (
        "unknown key 'overrides.0.replace.with.esp'; did you mean 'eps'? recipe.yaml:4"
    ),
    f"match: a\n    {NORM}, with: {{groups: 1.5}}}}": (
        "overrides.0.replace.with.groups is 1.5 (a number); expected an integer. recipe.yaml:4"
    ),
    f"match: a\n    {NORM}, with: {{gemm: fast}}}}": (
        "overrides.0.replace.with.gemm is 'fast'; expected one of loop, grouped. recipe.yaml:4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("entry", MISTAKES)
def test_a_wrong_override_is_told_with_key_and_line(load, entry):
    with pytest.raises(HPError) as caught:
        load(f"overrides:\n  - {entry}")
    assert caught.value.message == MISTAKES[entry]


def test_a_wrong_override_built_in_code_says_the_same():
    with pytest.raises(IllegalValueError, match="match is 'a'; expected something to change beside it"):
        Override(match="a")
