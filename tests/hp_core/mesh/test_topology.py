"""Topology: degrees, views, coordinates, groups, and every message about sizes that do not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hp_core.errors import PlanError
from hp_core.mesh.topology import VIEWS, Topology

DEGREE = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Topologies of at most 512 ranks, whose ep is any divisor of dp_shard * cp * tp."""
    degrees = {axis: draw(DEGREE) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    assume(math.prod(degrees.values()) <= 512)
    block = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
    ep = draw(st.sampled_from([number for number in range(1, block + 1) if block % number == 0]))
    return Topology(ep=ep, **degrees)


VIEW = st.sampled_from(sorted(VIEWS))


@given(topologies(), VIEW)
def test_every_view_covers_the_same_ranks(topology: Topology, view: str) -> None:
    assert math.prod(topology.view(view).sizes) == topology.world


@given(topologies(), VIEW, st.data())
def test_coordinates_and_rank_are_inverse(topology: Topology, view: str, data: st.DataObject) -> None:
    mesh = topology.view(view)
    rank = data.draw(st.integers(0, topology.world - 1))
    coordinates = mesh.coordinates(rank)
    assert mesh.rank(coordinates) == rank
    assert all(0 <= coordinates[axis] < mesh.size(axis) for axis in mesh.names)


@given(topologies(), VIEW, st.data())
def test_the_groups_of_an_axis_partition_the_world(topology: Topology, view: str, data: st.DataObject) -> None:
    mesh = topology.view(view)
    axis = data.draw(st.sampled_from(mesh.names))
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
    assert {len(group) for group in groups} == {mesh.size(axis)}


@given(topologies(), VIEW, st.data())
def test_a_rank_stands_in_its_group_at_its_coordinate(topology: Topology, view: str, data: st.DataObject) -> None:
    mesh = topology.view(view)
    axis = data.draw(st.sampled_from(mesh.names))
    rank = data.draw(st.integers(0, topology.world - 1))
    coordinates = mesh.coordinates(rank)
    group = mesh.group(rank, axis)
    assert group[coordinates[axis]] == rank
    assert all(mesh.coordinates(other) == {**coordinates, axis: place} for place, other in enumerate(group))


@given(topologies(), st.data())
def test_an_ep_group_is_ep_consecutive_ranks(topology: Topology, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, topology.world - 1))
    first = rank // topology.ep * topology.ep
    assert topology.view("expert").group(rank, "ep") == tuple(range(first, first + topology.ep))


@given(topologies())
def test_an_ep_group_covers_tp_before_anything_else(topology: Topology) -> None:
    assume(topology.ep >= topology.tp and topology.ep % topology.tp == 0)
    group = set(topology.view("expert").group(0, "ep"))
    assert set(topology.view("activation").group(0, "tp")) <= group


@given(topologies(), VIEW)
def test_axes_that_two_views_share_have_the_same_groups(topology: Topology, view: str) -> None:
    activation, other = topology.view("activation"), topology.view(view)
    for axis in set(activation.names) & set(other.names):
        assert activation.groups(axis) == other.groups(axis)


@given(topologies())
def test_fsdp_folds_cp_into_dp_shard(topology: Topology) -> None:
    activation, dense = topology.view("activation"), topology.view("dense")
    union = {member for rank in activation.group(0, "dp_shard") for member in activation.group(rank, "cp")}
    assert set(dense.group(0, "fsdp")) == union


@given(topologies())
def test_filling_dp_shard_gives_the_same_topology(topology: Topology) -> None:
    filled = Topology.for_world(
        topology.world,
        tp=topology.tp,
        cp=topology.cp,
        ep=topology.ep,
        pp=topology.pp,
        dp_replicate=topology.dp_replicate,
    )
    assert filled == topology


@given(topologies())
def test_parsing_what_is_written_gives_the_same_topology(topology: Topology) -> None:
    text = ",".join(f"{axis}={topology.degree(axis)}" for axis in ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate"))
    assert Topology.parse(text) == topology


@given(st.integers(1, 64), DEGREE, DEGREE, DEGREE, DEGREE)
def test_a_world_that_the_degrees_do_not_divide_names_both(world: int, pp: int, dp: int, cp: int, tp: int) -> None:
    product = pp * dp * cp * tp
    assume(world % product)
    with pytest.raises(PlanError) as raised:
        Topology.for_world(world, pp=pp, dp_replicate=dp, cp=cp, tp=tp)
    processes = "process" if world == 1 else "processes"
    assert str(raised.value) == (
        f"HP501: {world} {processes} cannot be divided by pp * dp_replicate * cp * tp = {pp} * {dp} * {cp} * {tp} = {product}; "
        f"expected a multiple of {product}. fix: start another number of processes, or change a degree"
    )


@given(DEGREE, DEGREE, DEGREE, st.integers(2, 16))
def test_an_ep_that_does_not_divide_names_its_factors(dp_shard: int, cp: int, tp: int, ep: int) -> None:
    block = dp_shard * cp * tp
    assume(block % ep)
    divisors = ", ".join(str(number) for number in range(1, block + 1) if block % number == 0)
    with pytest.raises(PlanError) as raised:
        Topology(dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)
    assert str(raised.value) == (
        f"HP502: dp_shard * cp * tp = {dp_shard} * {cp} * {tp} = {block} is not divisible by ep = {ep}; "
        f"expected ep to divide dp_shard * cp * tp. mesh: dp_replicate=1 dp_shard={dp_shard} pp=1 cp={cp} tp={tp} ep={ep}. "
        f"fix: choose ep among {divisors}, or make dp_shard a multiple of {ep // math.gcd(ep, cp * tp)}"
    )


def test_experts_take_ranks_of_the_data_axes_that_are_not_named() -> None:
    assert Topology.for_world(None, ep=2) == Topology(dp_shard=2, ep=2)
    assert Topology.for_world(None, ep=6, tp=2, cp=2) == Topology(dp_shard=3, tp=2, cp=2, ep=6)
    assert Topology.for_world(None, tp=2) == Topology(tp=2)
    with pytest.raises(PlanError, match="choose ep among 1, or make dp_shard a multiple of 2"):
        Topology.for_world(None, ep=2, dp_shard=1)


def test_degrees_that_do_not_multiply_to_the_world_are_printed() -> None:
    with pytest.raises(PlanError) as raised:
        Topology.for_world(8, tp=2, dp_shard=2)
    assert str(raised.value) == (
        "HP501: pp * dp_replicate * dp_shard * cp * tp = 1 * 1 * 2 * 1 * 2 = 4, but the job has 8 processes; "
        "expected degrees that multiply to 8. mesh: dp_replicate=1 dp_shard=2 pp=1 cp=1 tp=2 ep=1. "
        "fix: start 4 processes, or set dp_shard to -1"
    )


@pytest.mark.parametrize("world", [0, -1, True, "4"])
def test_a_world_that_is_not_a_positive_integer_is_refused(world: Any) -> None:
    with pytest.raises(PlanError) as raised:
        Topology.for_world(world)
    assert str(raised.value) == f"HP501: the number of processes is {world!r}; expected a positive integer"


@pytest.mark.parametrize("degree", [0, -2, True, 2.0, "2", None])
@pytest.mark.parametrize("axis", ["tp", "cp", "ep", "pp", "dp_shard", "dp_replicate"])
def test_a_degree_that_is_not_a_positive_integer_is_refused(axis: str, degree: Any) -> None:
    with pytest.raises(PlanError) as raised:
        Topology(**{axis: degree})
    assert str(raised.value) == f"HP503: mesh.{axis} is {degree!r}; expected a positive integer"


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp_replicate"])
def test_filling_checks_the_other_degrees_first(axis: str) -> None:
    arguments: dict[str, Any] = {axis: 0}
    with pytest.raises(PlanError) as raised:
        Topology.for_world(4, **arguments)
    assert str(raised.value) == f"HP503: mesh.{axis} is 0; expected a positive integer"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp=1", Topology()),
        ("tp=2,fsdp=2", Topology(tp=2, dp_shard=2)),
        ("dp=2, fsdp=2", Topology(dp_replicate=2, dp_shard=2)),
        ("tp = 4 , ep=4", Topology(tp=4, ep=4)),
        ("dp_shard=3,cp=2", Topology(dp_shard=3, cp=2)),
        ("ep=2", Topology(dp_shard=2, ep=2)),
        ("ep=4,tp=2", Topology(dp_shard=2, tp=2, ep=4)),
        ("ep=2,tp=4", Topology(tp=4, ep=2)),
    ],
)
def test_short_forms_are_understood(text: str, expected: Topology) -> None:
    assert Topology.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "HP503: '' names no axis; expected AXIS=NUMBER, such as tp=2; one process is tp=1"),
        (" , ", "HP503: ' , ' names no axis; expected AXIS=NUMBER, such as tp=2; one process is tp=1"),
        ("tp", "HP503: 'tp' is not an axis and its degree; expected AXIS=NUMBER, such as tp=2"),
        ("tp=x", "HP503: 'tp=x' is not an axis and its degree; expected AXIS=NUMBER, such as tp=2"),
        ("cp=2,tp=-1", "HP503: 'tp=-1' is not an axis and its degree; expected AXIS=NUMBER, such as tp=2. 'cp=2,tp=-1'"),
        (f"tp={'9' * 5000}", f"HP503: 'tp={'9' * 5000}' is not an axis and its degree; expected AXIS=NUMBER, such as tp=2"),
        (
            "tp=2 cp=2",
            "HP503: 'tp=2 cp=2' is not an axis and its degree; expected AXIS=NUMBER, such as tp=2. "
            "fix: separate axes by commas: tp=2,cp=2",
        ),
        (
            "sp=2",
            "HP503: there is no mesh axis 'sp'; expected one of tp, cp, ep, pp, dp_shard, dp_replicate, fsdp, dp. "
            "fix: sequence parallelism is part of tp: set tp, and mesh.sequence_parallel switches it (on by default)",
        ),
        (
            "etp=2",
            "HP503: there is no mesh axis 'etp'; expected one of tp, cp, ep, pp, dp_shard, dp_replicate, fsdp, dp. "
            "fix: experts are cut over tp where ep is 1, and never where it is more: set tp or ep",
        ),
        ("tp=0", "HP503: mesh.tp is 0; expected a positive integer"),
        ("fsdp=2,dp_shard=2", "HP503: axis dp_shard is named twice; expected each axis once. 'fsdp=2,dp_shard=2'"),
        (
            "dp_shards=2",
            "HP503: there is no mesh axis 'dp_shards'; did you mean 'dp_shard'?; "
            "expected one of tp, cp, ep, pp, dp_shard, dp_replicate, fsdp, dp",
        ),
    ],
)
def test_text_that_is_not_a_mesh_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        Topology.parse(text)
    assert str(raised.value) == message


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        Topology(tp=2).view("dense").coordinates(2)
    assert str(raised.value) == (
        "HP501: rank 2 is not in a mesh of 2 ranks. mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=2 ep=1"
    )


def test_an_axis_that_a_view_lacks_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        Topology().view("dense").size("ep")
    assert str(raised.value) == ("HP503: there is no mesh axis 'ep'; expected one of pp, dp_replicate, fsdp, tp")


def test_an_unknown_view_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        Topology().view("experts")
    assert str(raised.value) == (
        "HP503: there is no mesh view 'experts'; did you mean 'expert'?; expected one of activation, dense, expert"
    )


def test_an_unknown_degree_is_refused() -> None:
    with pytest.raises(PlanError) as raised:
        Topology().degree("world")
    assert str(raised.value) == (
        "HP503: there is no mesh axis 'world'; expected one of tp, cp, ep, pp, dp_shard, dp_replicate, fsdp, efsdp, data"
    )
