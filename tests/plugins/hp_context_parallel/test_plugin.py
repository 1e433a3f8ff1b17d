"""What hp-context-parallel declares: four protocols, and what they cannot do, found without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hp_context_parallel import plugin
from hp_context_parallel.legality import check_hybrid, check_ulysses
from hp_core.contracts import CPContext
from hp_core.mesh.topology import Topology
from hp_core.plugins.lazy import load
from hp_core.plugins.load import plugins_from

PROTOCOLS = {protocol.name: protocol for protocol in plugin.hp_protocols()}


def test_every_protocol_does_every_mask() -> None:
    assert sorted(PROTOCOLS) == ["allgather", "hybrid", "ring", "ulysses"]
    assert {protocol.masks for protocol in PROTOCOLS.values()} == {("causal", "sliding", "packed")}
    assert {name: p.sequence_layout for name, p in PROTOCOLS.items()} == {
        "allgather": "zigzag",
        "hybrid": "zigzag",
        "ring": "zigzag",
        "ulysses": "contiguous",
    }


def test_the_plugin_is_sound_and_its_contexts_load() -> None:
    (record,) = plugins_from(plugin).records
    assert record.status == "ok"
    assert all(issubclass(load(protocol.implementation), CPContext) for protocol in PROTOCOLS.values())


def test_declarations_and_legality_import_no_torch() -> None:
    modules = "hp_context_parallel.plugin, hp_context_parallel.legality, hp_context_parallel.rectangles"
    code = f"import sys, {modules}; print({{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


GQA = {"num_attention_heads": 8, "num_key_value_heads": 2}
MLA = {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 16}
LEGAL = [
    (GQA, Topology(cp=2)),
    (GQA, Topology(cp=8)),
    (GQA, Topology(cp=4, tp=2)),
    (GQA, Topology(cp=2, tp=4)),
    (MLA, Topology(cp=8)),
    ({}, Topology(cp=3)),
]


@pytest.mark.parametrize(("config", "topology"), LEGAL)
def test_heads_that_ranks_can_share(config: dict[str, Any], topology: Topology) -> None:
    assert check_ulysses({}, config, topology) == []


ILLEGAL = [
    (GQA, Topology(cp=3), "8 query heads and 2 key-value heads", "mesh.cp (3)", "1"),
    (GQA, Topology(cp=8, tp=2), "4 query heads and 1 key-value heads", "mesh.cp (8)", "1, 2, 4"),
    ({**GQA, "num_key_value_heads": 4}, Topology(cp=6), "8 query heads and 4 key-value heads", "mesh.cp (6)", "1, 2"),
    (
        {"num_attention_heads": 12, "num_key_value_heads": 4},
        Topology(cp=6),
        "12 query heads and 4 key-value heads",
        "mesh.cp (6)",
        "1, 2",
    ),
    (MLA, Topology(cp=16), "8 query heads and latents", "mesh.cp (16)", "1, 2, 4, 8"),
]


@pytest.mark.parametrize(("config", "topology", "heads", "degree", "legal"), ILLEGAL)
def test_heads_that_ranks_cannot_share(config: dict[str, Any], topology: Topology, heads: str, degree: str, legal: str) -> None:
    (problem,) = check_ulysses({}, config, topology)
    assert problem.code == "HP502"
    assert problem.what == f"{heads} on a tp rank cannot be shared among {degree} ranks"
    assert problem.expected == f"mesh.cp one of {legal}: query heads divisible by it, key-value heads divisible or a divisor"
    assert problem.where == "mesh.cp"
    assert problem.fix == f"set mesh.cp to {legal.split(', ')[-1]}, or choose another protocol"


def test_only_the_inner_axis_of_hybrid_shares_heads() -> None:
    topology = Topology(cp=12)
    assert check_hybrid({"sub_axes": {"cp_outer": 3, "cp_inner": 4}}, GQA, topology) == []
    (problem,) = check_hybrid({"sub_axes": {"cp_outer": 4, "cp_inner": 3}}, GQA, topology)
    assert "protocols.cp.inner (3)" in problem.what
    assert problem.expected.startswith("protocols.cp.inner one of 1, 2, 4: ")
