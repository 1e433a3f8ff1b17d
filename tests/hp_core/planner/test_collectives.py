"""The table of differences between layouts and the collectives they mean (forward, backward, dim)."""

from __future__ import annotations

import pytest

from hp_core.contracts import ModuleShardingSpec, Partial, Port, Replicate, Shard
from hp_core.errors import PlanError
from hp_core.mesh.topology import Topology
from hp_core.planner.collectives import compile_boundary, describe_move, is_varying, itemsize, port_shape

VARYING, INVARIANT = {"weight": {"tp": Shard(0)}}, {"weight": {"tp": Replicate()}}
TABLE = [  # when, params, src, dst, (forward, backward, dim)
    ("enter", VARYING, Shard(1), Replicate(), ("all_gather", "reduce_scatter", 1)),
    ("enter", INVARIANT, Shard(1), Replicate(), ("all_gather", "split", 1)),
    ("enter", VARYING, Replicate(), Replicate(), ("identity", "all_reduce", None)),
    ("enter", INVARIANT, Replicate(), Replicate(), None),
    ("enter", VARYING, Replicate(), Shard(1), ("split", "all_gather", 1)),
    ("enter", VARYING, Shard(0), Shard(0), None),
    ("exit", VARYING, Partial(), Replicate(), ("all_reduce", "identity", None)),
    ("exit", VARYING, Partial(), Shard(1), ("reduce_scatter", "all_gather", 1)),
    ("exit", VARYING, Shard(1), Replicate(), ("all_gather", "split", 1)),
    ("exit", VARYING, Replicate(), Replicate(), None),
    ("exit", VARYING, Shard(1), Shard(1), None),
]
ILLEGAL = [
    ("enter", Shard(0), Shard(1)),
    ("enter", Partial(), Replicate()),
    ("enter", Partial(), Partial()),
    ("enter", Replicate(), Partial()),
    ("exit", Shard(0), Shard(1)),
    ("exit", Replicate(), Shard(1)),
    ("exit", Replicate(), Partial()),
    ("exit", Partial(), Partial()),
]


def spec_of(when, src, dst, *, params=VARYING, port=None, axis="tp"):
    ports = {} if port is None else {"x": port}
    if when == "enter":
        return ModuleShardingSpec(params=params, in_src={"x": {axis: src}}, in_dst={"x": {axis: dst}}, ports=ports)
    return ModuleShardingSpec(
        params=params, out_names=("x",), out_src={"x": {axis: src}}, out_dst={"x": {axis: dst}}, ports=ports
    )


def compiled(spec, *, topology=None, compute="float32"):
    return compile_boundary("m", spec, topology=topology or Topology(tp=4), batch=2, sequence=8, compute=compute)


@pytest.mark.parametrize(("when", "params", "src", "dst", "expected"), TABLE)
def test_a_difference_on_tp_is_one_collective_with_its_adjoint(when, params, src, dst, expected):
    found = compiled(spec_of(when, src, dst, params=params))
    assert [(c.port, c.when, c.axis) for c in found] == ([] if expected is None else [("x", when, "tp")])
    assert [(c.forward, c.backward, c.dim) for c in found] == ([] if expected is None else [expected])


@pytest.mark.parametrize(("when", "params", "src", "dst", "expected"), TABLE)
def test_a_tp_axis_of_one_rank_needs_nothing(when, params, src, dst, expected):
    assert compiled(spec_of(when, src, dst, params=params), topology=Topology()) == ()


@pytest.mark.parametrize(("when", "src", "dst"), ILLEGAL)
def test_a_difference_without_a_collective_is_refused_on_every_mesh(when, src, dst):
    for topology in (Topology(), Topology(tp=4)):
        with pytest.raises(PlanError) as error:
            compiled(spec_of(when, src, dst), topology=topology)
        assert str(error.value) == (
            f"HP522: m:x goes from tp={src} to tp={dst}; there is no collective for this difference on tp"
        )


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_a_boundary_never_changes_the_layout_on_cp_or_ep(axis):
    with pytest.raises(PlanError) as error:
        compiled(spec_of("enter", Shard(1), Replicate(), axis=axis))
    assert (
        str(error.value) == f"HP522: m:x goes from {axis}=Shard(1) to {axis}=Replicate; a boundary keeps the layout on {axis}"
    )


@pytest.mark.parametrize(
    ("spec", "varying"),
    [
        (ModuleShardingSpec(), False),
        (ModuleShardingSpec(params={"w": {"tp": Replicate()}}), False),
        (ModuleShardingSpec(params={"w": {"cp": Shard(0)}}), False),
        (ModuleShardingSpec(params={"w": {"tp": Shard(0)}}), True),
        (ModuleShardingSpec(in_src={"x": {"tp": Shard(1)}}), True),
        (ModuleShardingSpec(in_src={"x": {"tp": Shard(1)}}, in_dst={"x": {"tp": Replicate()}}), False),
        (ModuleShardingSpec(in_src={"x": {"tp": Shard(1)}}, in_dst={"x": {"tp": Shard(1)}}), True),
        (ModuleShardingSpec(out_src={"output": {"tp": Partial()}}), True),
    ],
)
def test_a_body_varies_iff_a_parameter_an_in_dst_or_an_out_src_is_cut_or_partial(spec, varying):
    assert is_varying(spec, topology=Topology(tp=2)) is varying
    assert is_varying(spec, topology=Topology()) is False


@pytest.mark.parametrize(
    ("when", "src", "dst", "dtype", "sent"),
    [  # [2, 8, 16] elements on 4 ranks; all-gather and reduce-scatter send 3/4 of the whole, all-reduce twice that
        ("enter", Shard(1), Replicate(), "compute", (192 * 4, 192 * 4)),
        ("enter", Shard(1), Replicate(), "int64", (192 * 8, 0)),
        ("enter", Replicate(), Replicate(), "compute", (0, 384 * 4)),
        ("enter", Replicate(), Shard(1), "float64", (0, 192 * 8)),
        ("exit", Partial(), Replicate(), "compute", (384 * 4, 0)),
        ("exit", Partial(), Shard(1), "bfloat16", (192 * 2, 192 * 2)),
        ("exit", Shard(1), Replicate(), "compute", (192 * 4, 0)),
    ],
)
def test_bytes_are_what_one_rank_sends_forward_and_backward(when, src, dst, dtype, sent):
    (found,) = compiled(spec_of(when, src, dst, port=Port(shape=("B", "S", 16), dtype=dtype)))
    assert (found.elements, found.forward_bytes, found.backward_bytes, found.bytes) == (256, *sent, sum(sent))


def test_half_precision_sends_half_the_bytes():
    port = Port(shape=("T", 16))
    assert [
        compiled(spec_of("exit", Partial(), Replicate(), port=port), compute=dtype)[0].bytes
        for dtype in ("float32", "bfloat16")
    ] == [1536, 768]


def test_an_integer_that_stays_replicated_has_no_gradient_to_complete():
    assert compiled(spec_of("enter", Replicate(), Replicate(), port=Port(shape=("B", "S"), dtype="int64"))) == ()


def test_an_integer_travels_forward_only():
    (found,) = compiled(spec_of("enter", Shard(1), Replicate(), port=Port(shape=("B", "S"), dtype="int64")))
    assert (found.forward, found.backward, describe_move(found)) == ("all_gather", None, "all_gather(1) / -")


def test_what_no_gradient_passes_has_no_backward():
    def made(when, src, dst):
        spec = spec_of(when, src, dst, params=VARYING)
        return compile_boundary("m", spec, topology=Topology(tp=4), batch=2, sequence=8, compute="float32", constant={"m:x"})

    assert made("enter", Replicate(), Replicate()) == ()
    assert [(move.forward, move.backward) for move in made("enter", Shard(1), Replicate())] == [("all_gather", None)]


def test_only_the_part_of_a_sequence_cut_over_cp_travels():
    spec = ModuleShardingSpec(
        params=VARYING,
        in_src={"x": {"cp": Shard(1), "tp": Shard(1)}},
        in_dst={"x": {"cp": Shard(1)}},
        ports={"x": Port(shape=("B", "S", 16))},
    )
    assert compiled(spec, topology=Topology(tp=2, cp=2))[0].bytes == 512


def test_sizes_and_moves_are_named():
    assert port_shape(Port(shape=("B", "S", "T", 3)), batch=2, sequence=5) == (2, 5, 10, 3)
    assert itemsize("bfloat16") == 2
    (move,) = compiled(spec_of("enter", Shard(1), Replicate()))
    assert describe_move(move) == "all_gather(1) / reduce_scatter"


def test_a_module_that_is_no_boundary_has_no_ports():
    assert compiled(ModuleShardingSpec(params=VARYING, is_boundary=False)) == ()
