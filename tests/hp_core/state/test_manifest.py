"""The manifest accounts for every tensor of a plan: its keys, their shapes, and what is wrong with a mapping."""

from __future__ import annotations

import pytest

from hp_core.contracts import BufferPlan, BuildPlan, CheckpointMapping, Join, KeyRule, ParameterPlan, Unflatten
from hp_core.errors import CheckpointError
from hp_core.mesh.topology import Topology
from hp_core.state.manifest import Piece, make_manifest, some

EXPERTS = "layers.{i}.experts."
FUSED = KeyRule(
    runtime=EXPERTS + "gate_up",
    files=(EXPERTS + "{e}.gate.weight", EXPERTS + "{e}.up.weight"),
    experts=2,
    concat_dim=1,
)


def plan(*parameters: ParameterPlan, buffers=(), rules=(), ignored=()) -> BuildPlan:
    return BuildPlan(
        adapter="toy",
        model_class="toy:Toy",
        topology=Topology(),
        model_dtype="float32",
        device="cpu",
        batch=1,
        sequence=8,
        parameters=parameters,
        buffers=buffers,
        mapping=CheckpointMapping(rules=rules, ignored=ignored),
    )


def parameter(fqn: str, shape: tuple[int, ...], **fields) -> ParameterPlan:
    return ParameterPlan(fqn=fqn, owner="", shape=shape, dtype="float32", **fields)


def test_a_tensor_without_a_rule_keeps_its_name():
    manifest = make_manifest(plan(parameter("norm.weight", (4,))))
    assert manifest.entries[0].pieces == (Piece(key="norm.weight", shape=(4,)),)


def test_saved_buffers_are_entries_and_others_are_not():
    buffers = [
        BufferPlan(fqn="bias", shape=(4,), dtype="float32", persistent=True),
        BufferPlan(fqn="inv_freq", shape=(2,), dtype="float32", persistent=False),
    ]
    assert [entry.fqn for entry in make_manifest(plan(buffers=buffers)).entries] == ["bias"]


def test_experts_are_stacked_and_their_halves_joined():
    entry = make_manifest(plan(parameter("layers.3.experts.gate_up", (2, 6, 5)), rules=[FUSED])).entries[0]
    assert entry.pieces == (
        Piece(key="layers.3.experts.0.gate.weight", shape=(3, 5), expert=0, dim=1, start=0),
        Piece(key="layers.3.experts.0.up.weight", shape=(3, 5), expert=0, dim=1, start=3),
        Piece(key="layers.3.experts.1.gate.weight", shape=(3, 5), expert=1, dim=1, start=0),
        Piece(key="layers.3.experts.1.up.weight", shape=(3, 5), expert=1, dim=1, start=3),
    )
    assert {piece.length for piece in entry.pieces} == {3}


def test_a_component_s_shape_is_undone_before_the_rule_applies():
    transformed = parameter("layers.0.experts.gate_up", (2, 2, 3, 5), transforms=(Unflatten(1, (2, -1)),))
    entry = make_manifest(plan(transformed, rules=[FUSED])).entries[0]
    assert entry.shape == (2, 6, 5)
    assert entry.pieces[1].shape == (3, 5)


QKV = (Unflatten(0, (-1, -1, -1)), Join(1, {"q.weight": -1, "k.weight": 1, "v.weight": 1}))


def test_a_joined_parameter_has_an_entry_for_each_of_its_parts():
    joined = ParameterPlan(
        fqn="a.qkv.weight", owner="a", shape=(2, 5, 3, 4), dtype="float32", transforms=QKV, aliases=("b.qkv.weight",)
    )
    entries = make_manifest(plan(joined)).entries
    assert [(entry.fqn, entry.parameter, entry.shape) for entry in entries] == [
        ("a.q.weight", "a.qkv.weight", (18, 4)),
        ("a.k.weight", "a.qkv.weight", (6, 4)),
        ("a.v.weight", "a.qkv.weight", (6, 4)),
    ]
    assert [pieces[0].key for pieces in entries[1].names] == ["a.k.weight", "b.k.weight"]


def test_a_joined_parameter_that_is_tied_to_something_else_is_refused():
    joined = ParameterPlan(
        fqn="a.qkv.weight", owner="a", shape=(2, 5, 3, 4), dtype="float32", transforms=QKV, aliases=("b.weight",)
    )
    with pytest.raises(CheckpointError) as caught:
        make_manifest(plan(joined))
    assert str(caught.value) == (
        "HP806: a.qkv.weight, which joins several tensors, is tied to b.weight; expected a tie to the same parameter of "
        "another component"
    )


def test_parts_without_experts_are_joined_along_any_dim():
    rule = KeyRule(runtime="{layer}.qkv", files=("{layer}.q", "{layer}.k", "{layer}.v"), concat_dim=0)
    pieces = make_manifest(plan(parameter("a.b.qkv", (6, 4)), rules=[rule])).entries[0].pieces
    assert [(piece.key, piece.shape, piece.start) for piece in pieces] == [
        ("a.b.q", (2, 4), 0),
        ("a.b.k", (2, 4), 2),
        ("a.b.v", (2, 4), 4),
    ]


def test_the_first_matching_rule_decides():
    rules = [KeyRule(runtime="a.{x}", files=("first.{x}",)), KeyRule(runtime="{x}.{y}", files=("second.{x}.{y}",))]
    keys = [
        entry.pieces[0].key
        for entry in make_manifest(plan(parameter("a.w", (1,)), parameter("b.w", (1,)), rules=rules)).entries
    ]
    assert keys == ["first.w", "second.b.w"]


def test_a_tied_tensor_has_one_entry_with_a_key_for_each_name():
    entry = make_manifest(plan(parameter("embed.weight", (4, 2), aliases=("head.weight",)))).entries[0]
    assert [pieces[0].key for pieces in entry.names] == ["embed.weight", "head.weight"]
    assert entry.pieces[0].key == "embed.weight"


def test_ignored_patterns_match_whole_keys():
    manifest = make_manifest(plan(ignored=("layers.61.{rest}",)))
    assert manifest.ignores("layers.61.a.b")
    assert not manifest.ignores("layers.610.a")
    assert not manifest.ignores("my.layers.61.a")


WRONG = [
    (KeyRule(runtime="w", files=()), "names no file keys"),
    (KeyRule(runtime="w", files=("{i}.w",)), "has file keys whose placeholders are not none"),
    (KeyRule(runtime="w", files=("w.0",), experts=4), "has file keys whose placeholders are not e"),
    (KeyRule(runtime="w", files=("a", "b")), "has 2 file keys and concat_dim None"),
    (KeyRule(runtime="w", files=("a",), concat_dim=1), "has 1 file keys and concat_dim 1"),
    (
        KeyRule(runtime="w", files=("{e}",), experts=3),
        "stacks 3 experts on dim 0 and joins on dim None, but the tensor is [4, 5]",
    ),
    (KeyRule(runtime="w", files=("a", "b"), concat_dim=1), "joins 2 equal parts on dim 1, but the tensor is [4, 5]"),
    (KeyRule(runtime="w", files=("a", "b"), concat_dim=2), "joins 2 equal parts on dim 2, but the tensor is [4, 5]"),
]


@pytest.mark.parametrize(("rule", "problem"), WRONG)
def test_a_rule_that_cannot_describe_its_tensor_is_refused(rule, problem):
    with pytest.raises(CheckpointError) as caught:
        make_manifest(plan(parameter("w", (4, 5)), rules=[rule]))
    assert str(caught.value) == f"HP806: the checkpoint rule for w ('w') {problem}. fix: correct the adapter"


def test_one_key_for_two_tensors_is_refused():
    rules = [KeyRule(runtime="a.w", files=("shared",)), KeyRule(runtime="b.w", files=("shared",))]
    with pytest.raises(CheckpointError) as caught:
        make_manifest(plan(parameter("a.w", (1,)), parameter("b.w", (1,)), rules=rules))
    assert str(caught.value) == (
        "HP806: the checkpoint rules store several tensors under one file key: shared; expected one tensor for a key. "
        "fix: correct the adapter's checkpoint rules"
    )


@pytest.mark.parametrize(("count", "text"), [(1, "k0"), (3, "k0, k1, k2"), (5, "k0, k1, k2 and 2 more")])
def test_three_keys_are_named_and_the_rest_counted(count, text):
    assert some(f"k{index}" for index in range(count)) == text
