from __future__ import annotations

import attrs
import pytest

from hp_core.contracts import Traffic
from hp_core.contracts.plan import ProtocolTraffic
from hp_core.mesh.topology import Topology
from hp_core.planner import report
from hp_core.planner.explain import explain
from hp_core.planner.figures import protocol_bytes
from hp_core.planner.report import headline, protocols, tables


def by_title(plan, adapter):
    return {table.title: table for table in tables(plan, adapter=adapter)}


def test_the_headline_says_model_mesh_sizes_and_work(make_plan, toy, layouts):
    layouts.flops = lambda config, sequence: 1.5e9
    adapter = attrs.evolve(toy.ADAPTER, flops="toy_layouts:flops")
    plan = make_plan(Topology(tp=2, dp_shard=4), adapter=adapter)
    assert headline(plan, adapter=adapter) == (
        "toy: Model, float32 on cpu",
        "mesh: dp_replicate=1 dp_shard=4 pp=1 cp=1 tp=2 ep=1; 8 ranks, sequence parallel on, loss parallel on, "
        "shared memory on",
        "parameters: 1,040, of which 1,040 are active for a token, 1.50 GFLOP per token to train",
        "micro-batch: 1 x 4096 tokens for each of 4 data-parallel parts",
        "FSDP: wraps 3 units, cut over 4 ranks (dp_shard * cp)",
        f"plugins: {plan.plugins[0]}",
    )


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ({"tp": 2}, "FSDP: wraps nothing, since one rank holds every parameter, in the dtype that it is computed in"),
        ({"dp_replicate": 2}, "FSDP: wraps 3 units, whole on one rank, 2 copies (dp_replicate)"),
        ({"dp_shard": 2, "dp_replicate": 3}, "FSDP: wraps 3 units, cut over 2 ranks (dp_shard * cp), 3 copies (dp_replicate)"),
    ],
)
def test_the_headline_says_what_fsdp_wraps(make_plan, toy, mesh, text):
    assert text in headline(make_plan(Topology(**mesh)), adapter=toy.ADAPTER)


def test_experts_that_are_left_out_are_said(make_plan, toy):
    plan = make_plan(Topology(dp_shard=2))
    layer, *others = plan.units
    plan = attrs.evolve(plan, units=[attrs.evolve(layer, view="expert", wraps=False), *others])
    text = "FSDP: wraps 2 units, cut over 2 ranks (dp_shard * cp); 1 of experts, whole on one rank, are not wrapped"
    assert text in headline(plan, adapter=toy.ADAPTER)
    table = by_title(plan, toy.ADAPTER)["FSDP units, inner first"]
    assert [row[3] for row in table.rows] == ["not wrapped", "freed after forward", "kept until backward"]


def test_repeated_layers_are_one_row_each(make_plan, toy):
    found = by_title(make_plan(), toy.ADAPTER)
    assert [row[:3] for row in found["boundaries"].rows] == [
        ("embed", "Table", "varying"),
        ("layers.{0..1}.norm", "Norm", "varying"),
        ("layers.{0..1}.mlp", "Mlp", "varying"),
        ("head", "Linear", "varying"),
    ]
    assert found["parameters"].rows[1] == (
        "layers.{0..1}.norm.weight", "8", "float32", "tp=Replicate", "tp=Partial", "-", "layer",
    )  # fmt: skip
    assert found["collectives per micro-batch and rank"].rows == (
        ("embed:output", "exit", "tp reduce_scatter(1) / all_gather", "65,536", "65,536", "131,072"),
        ("layers.{0..1}.mlp:x", "enter", "tp all_gather(1) / reduce_scatter", "65,536", "65,536", "262,144"),
        ("layers.{0..1}.mlp:output", "exit", "tp reduce_scatter(1) / all_gather", "65,536", "65,536", "262,144"),
        ("head:x", "enter", "tp all_gather(1) / reduce_scatter", "65,536", "65,536", "131,072"),
    )
    assert found["replacements"].rows == (("embed", "Embedding -> Table", "-", "adapter toy"),)


def test_a_placement_says_what_fsdp_cuts_of_what_is_there(make_plan, toy):
    rows = by_title(make_plan(Topology(tp=2, dp_shard=2)), toy.ADAPTER)["parameters"].rows
    assert [row[3] for row in rows[:2]] == ["tp=Shard(0) fsdp=Shard(0)", "tp=Replicate fsdp=Shard(0)"]
    lines = explain(make_plan(Topology(tp=2, dp_shard=2)), "layers.0.norm.weight")
    assert "  placement: tp=Replicate fsdp=Shard(0): FSDP cuts what is there over 2 ranks" in lines
    assert by_title(make_plan(), toy.ADAPTER)["parameters"].rows[0][3] == "tp=Shard(0)"


def test_empty_tables_are_left_out(make_plan, toy):
    assert "collectives per micro-batch and rank" not in by_title(make_plan(Topology()), toy.ADAPTER)


def test_frozen_tied_and_recomputed_are_marked(make_plan, toy):
    inventory = attrs.evolve(toy.inventory, aliases={"head.weight": "embed.weight"})
    plan = make_plan(inventory=inventory, keys={"freeze": ["embed.*"], "recompute": {"mode": "full", "layers": [0]}})
    found = by_title(plan, toy.ADAPTER)
    assert found["parameters"].rows[0][4:] == ("frozen", "= head.weight, Unflatten(dim=0, sizes=(-1,))", "root")
    assert [(row[0], row[-1]) for row in found["FSDP units, inner first"].rows] == [
        ("layers.0", "full"),
        ("layers.1", "-"),
        ("(root)", "-"),
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (1023, "1,023"), (1024, "1,024 (1.00 KiB)"), (3 * 2**30, "3,221,225,472 (3.00 GiB)")],
)
def test_bytes_are_exact_and_readable(count, text):
    numbers = report.Figures(
        total=0, active=0, flops_per_token=None, parameter_bytes=count, gradient_bytes=0, optimizer_bytes=0,
        gathered_bytes=0, activation_bytes=0, boundary_forward_bytes=0, boundary_backward_bytes=count, completion_bytes=0,
        fsdp_forward_bytes=0, fsdp_backward_bytes=0,
    )  # fmt: skip
    memory, sent = report.memory(numbers).rows, report.traffic(numbers).rows
    assert (memory[0], memory[-1]) == (("parameters", "always", text), ("total", "at its peak, about", text))
    assert (sent[0], sent[-1]) == (("at boundaries", "0", text, text), ("total", "0", text, text))


def test_a_collective_of_unknown_size_shows_no_bytes(make_plan, toy, layouts):
    given = layouts.mlp
    layouts.mlp = lambda info, ctx: attrs.evolve(given(info, ctx), ports={})
    rows = by_title(make_plan(), toy.ADAPTER)["collectives per micro-batch and rank"].rows
    assert rows[1] == ("layers.{0..1}.mlp:x", "enter", "tp all_gather(1) / reduce_scatter", "-", "-", "-")


@pytest.mark.parametrize(("work", "text"), [(2.308e10, "23.08 GFLOP"), (4.2e6, "4.20 MFLOP"), (950.0, "0.95 kFLOP")])
def test_work_is_told_in_a_unit_that_fits(make_plan, toy, layouts, work, text):
    layouts.flops = lambda config, sequence: work
    adapter = attrs.evolve(toy.ADAPTER, flops="toy_layouts:flops")
    assert headline(make_plan(adapter=adapter), adapter=adapter)[2].endswith(f", {text} per token to train")


def test_what_protocols_send_has_a_table_and_rows_in_the_sum(make_plan):
    told = Traffic(forward=1_000, backward=2_000, forward_bytes=24, backward_bytes=8, assumed="expected")
    entries = (
        ProtocolTraffic(kind="cp", name="quiet", modules=2),
        ProtocolTraffic(kind="ep", name="dedup", modules=3, traffic=told),
    )
    plan = attrs.evolve(make_plan(), traffic=entries)
    assert protocols(plan).rows == (
        ("cp by quiet", "2", "-", "-", "the protocol does not say"),
        ("ep by dedup", "3", "1,000", "2,000", "expected; and 24 and 8 bytes beside them"),
    )
    assert protocol_bytes(plan) == {"ep": (3 * (4 * 1_000 + 24), 3 * (4 * 2_000 + 8))}
