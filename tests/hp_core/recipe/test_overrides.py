"""Overrides: replacements and freezing load; what contradicts itself or names nothing is refused."""

import pytest

from hp_core.contracts import Partial, Replicate, Shard
from hp_core.errors import HPError
from hp_core.mesh.topology import Topology
from hp_core.recipe.overrides import Override, Replace, is_active
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


def test_layouts_are_typed(load):
    recipe = load(
        "overrides:\n  - match: a\n    params: {o.weight: {tp: shard(1)}, q: {tp: partial, cp: replicate}, n: {}, i: auto}"
    )
    layouts = {"o.weight": {"tp": Shard(1)}, "q": {"tp": Partial(), "cp": Replicate()}, "n": {}, "i": "auto"}
    assert recipe.overrides == (Override(match="a", params=layouts),)
    assert recipe.overrides[0].layouts == {"params": layouts}


def test_a_mapping_without_keys_is_a_change_and_auto_is_none():
    assert Override(match="a", in_src={}).layouts == {"in_src": {}}
    with pytest.raises(IllegalValueError):
        Override(match="a", in_src="auto")


ACTIVE = [
    (None, Topology(), "float32", True),
    ("cp", Topology(cp=2), "float32", True),
    ("cp", Topology(ep=2, dp_shard=2), "float32", False),
    ("ep", Topology(ep=2, dp_shard=2), "float32", True),
    ("low_precision", Topology(), "bfloat16", True),
    ("low_precision", Topology(), "float64", False),
]


@pytest.mark.parametrize(("when", "topology", "compute", "expected"), ACTIVE)
def test_an_override_is_active_when_what_it_waits_for_is_in_use(when, topology, compute, expected):
    assert is_active(Override(match="a", when=when, params={}), topology=topology, compute=compute) is expected


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
    "match: a\n    when: cp\n    freeze: [x]": (
        "overrides.0.when is 'cp'; expected null, since freezing never depends on the mesh. recipe.yaml:4"
    ),
    "match: a.f\n    replace: {kind: method, implementation: norm, with: {eps: 1}}": (
        "overrides.0.replace.with is a mapping; expected nothing, since a method has no arguments of its own. recipe.yaml:4"
    ),
    "match: a\n    scheme: fp4": "no installed plugin provides the scheme 'fp4'. recipe.yaml:4. "
    "fix: hp plugins list shows what is installed",
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
        "name code to import. recipe.yaml:4. fix: if the code is yours, add --trust os to the command line"
    ),
    "match: a\n    replace: {kind: module, implementation: nrom, source_type: X}": (
        "no installed plugin provides the family 'nrom'; did you mean 'norm'? recipe.yaml:4"
    ),
    "match: a\n    replace: {kind: module, implementation: ring, source_type: X}": (
        "overrides.0.replace.implementation is 'ring', a protocol over cp; expected the name of a registered family: a "
        "protocol says how modules communicate and takes no module's place. recipe.yaml:4. fix: protocols: {cp: ring}"
    ),
    "match: a\n    replace: {kind: module, implementation: dedup, source_type: X}": (
        "overrides.0.replace.implementation is 'dedup', a protocol over ep; expected the name of a registered family: a "
        "protocol says how modules communicate and takes no module's place. recipe.yaml:4. fix: protocols: {ep: dedup}"
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
