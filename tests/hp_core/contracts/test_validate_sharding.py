"""A boundary's layout: every way to contradict the contract, word for word."""

from typing import Any

import pytest

from hp_core.contracts import FirstRank, HeadSlice, ModuleShardingSpec, Partial, Port, Replicate, Shard
from hp_core.contracts.validate import validate
from hp_core.contracts.validate_sharding import validate_sharding
from hp_core.errors import DeclarationError

R, S0, S1, P = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}, {"tp": Partial()}
spec = ModuleShardingSpec

LEGAL = [
    spec(),
    spec(params={"weight": {}}, is_boundary=False),
    spec(
        params={"q.weight": S0},
        in_src={"x": S1},
        in_dst={"x": R},
        out_src={"output": P},
        out_dst={"output": S1},
        out_names=("output", None),
    ),
    spec(params={"k.weight": R, "o.bias": {}}, views={"k.weight": HeadSlice(0, 2), "o.bias": FirstRank()}),
    spec(in_src={"x": {"cp": Shard(1), "tp": Replicate(), "ep": Replicate()}}, ports={"x": Port(shape=("B", "S", 64))}),
    spec(local_attrs=("num_heads", "num_kv_heads")),
]


@pytest.mark.parametrize("declaration", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_layout_passes(declaration: ModuleShardingSpec) -> None:
    validate(declaration)


ILLEGAL = [
    (spec(params={"w": {"fsdp": Shard(0)}}), "params['w'] names the axis 'fsdp'; expected tp, cp or ep"),
    (spec(in_src={"x": {"dp": Shard(0)}}), "in_src['x'] names the axis 'dp'; expected tp, cp or ep"),
    (
        spec(out_src={"output": {"tp": "shard"}}),
        "out_src['output'] has 'shard' on tp; expected Shard(dim), Replicate() or Partial()",
    ),
    (
        spec(params={"w": {"tp": Shard(-1)}}),
        "params['w'] has Shard(-1) on tp; expected a dim counted from the front, 0 or more",
    ),
    (
        spec(in_src={"x": {"cp": Shard(True)}}),
        "in_src['x'] has Shard(True) on cp; expected a dim counted from the front, 0 or more",
    ),
    (spec(params={"w": P}), "params['w'] is Partial on tp; expected Shard or Replicate, since a parameter is never a summand"),
    (spec(params={"": S0}), "params names ''; expected a parameter's path relative to the boundary"),
    (spec(in_dst={"x": R}), "in_dst['x'] has no in_src; expected the layout on arrival too"),
    (spec(out_dst={"output": R}), "out_dst['output'] has no out_src; expected the layout that the body produces too"),
    (
        spec(in_src={"hidden": S1}, in_dst={"hidden_states": R}),
        "in_dst['hidden_states'] has no in_src; expected the layout on arrival too, beside that of hidden",
    ),
    (
        spec(out_src={"ouput": P}, out_dst={"output": R}),
        "out_src['ouput'] is not an output; did you mean 'output'?; expected one of out_names (output)",
    ),
    (
        spec(out_src={"output": P}, out_dst={"ouput": R}),
        "out_dst['ouput'] is not an output; did you mean 'output'?; expected one of out_names (output)",
    ),
    (
        spec(params={"k.weight": R}, views={"k.wieght": FirstRank()}),
        "views['k.wieght'] is not a declared parameter; did you mean 'k.weight'?; expected one of params",
    ),
    (
        spec(in_src={"hidden_states": R}, ports={"hidden_state": Port(shape=("B",))}),
        "ports['hidden_state'] is neither an argument nor an output; did you mean 'hidden_states'?; "
        "expected a declared name (hidden_states, output)",
    ),
    (spec(out_src={"hidden": R}), "out_src['hidden'] is not an output; expected one of out_names (output)"),
    (spec(out_src={"a": R}, out_names=(None,)), "out_src['a'] is not an output; expected one of out_names (no names)"),
    (spec(out_names=("a", "a")), "out_names holds 'a' twice; expected each once"),
    (spec(out_names=("a b",)), "out_names holds 'a b'; expected a Python name"),
    (spec(local_attrs=("heads", "heads")), "local_attrs holds 'heads' twice; expected each once"),
    (spec(is_boundary=0), "is_boundary is 0; expected True or False"),
    (spec(each_token=1), "each_token is 1; expected True or False"),
    (spec(is_boundary=False, in_src={"x": R}), "is_boundary is False but in_src is declared; expected parameters only"),
    (spec(views={"w": FirstRank()}), "views['w'] is not a declared parameter; expected one of params"),
    (spec(params={"w": R}, views={"w": "first"}), "views['w'] is 'first'; expected HeadSlice(dim, parts) or FirstRank()"),
    (
        spec(params={"w": S0}, views={"w": FirstRank()}),
        "views['w'] is a FirstRank of a parameter that is Shard(0) on tp; expected Replicate",
    ),
    (
        spec(params={"w": R}, views={"w": HeadSlice(0, 0)}),
        "views['w'] is HeadSlice(dim=0, parts=0); expected dim 0 or more and parts 1 or more",
    ),
    (
        spec(ports={"x": Port(shape=("B",))}),
        "ports['x'] is neither an argument nor an output; expected a declared name (output)",
    ),
    (spec(ports={"output": Port(shape=("N",))}), "ports['output'] has the size 'N'; expected a positive integer, B, S or T"),
    (spec(ports={"output": Port(shape=(0,))}), "ports['output'] has the size 0; expected a positive integer, B, S or T"),
    (spec(ports={"output": Port(shape=("B",), dtype="")}), "ports['output']: dtype is ''; expected a text"),
]


@pytest.mark.parametrize(("declaration", "message"), ILLEGAL, ids=[case[1][:60] for case in ILLEGAL])
def test_an_illegal_layout_is_refused(declaration: ModuleShardingSpec, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate_sharding(declaration)
    assert caught.value.line == f"hp: error[HP402]: {message}"


def test_the_error_says_whose_layout_it_is() -> None:
    with pytest.raises(DeclarationError) as caught:
        validate_sharding(spec(params={"w": P}), where="model.norm (acme.layout:norm)")
    assert caught.value.line == (
        "hp: error[HP402]: params['w'] is Partial on tp; expected Shard or Replicate, since a parameter is never a summand. "
        "model.norm (acme.layout:norm)"
    )


def test_a_layout_keeps_what_it_was_given() -> None:
    given: Any = {"x": {"tp": Shard(1)}}
    declaration = spec(in_src=given)
    given["x"]["tp"] = Replicate()
    assert declaration.in_src == {"x": {"tp": Shard(1)}}
