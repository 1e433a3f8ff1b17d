"""The cells of context parallelism and packed documents, for Qwen3-MoE (grouped heads) and DeepSeek-V3 (latents)."""

from __future__ import annotations

from typing import Any

import deepseek_cells
from qwen3_moe_cells import BOTH, COMPONENTS, FULL, MOE, PACKED, SELECTIVE, SEQUENCE, model

from hp_core.mesh.topology import Topology
from hp_core.testing.cell import Cell, ModelCase

CP2, CP4, CP2_TP2 = Topology(cp=2), Topology(cp=4), Topology(cp=2, tp=2)
PROTOCOLS = ("allgather", "ulysses", "ring")


def over(name: str, **options: Any) -> dict[str, Any]:
    """Return the setting of a protocol over cp."""
    return {"protocols": {"cp": {"name": name, **options}}}


def packed(case: ModelCase) -> ModelCase:
    """Return the case with several documents in every row."""
    return ModelCase(adapter=case.adapter, config=case.config, packed=True)


ONE_HEAD = model(num_key_value_heads=1)
WINDOW = model(use_sliding_window=True, sliding_window=19)
PACKED_WINDOW = packed(WINDOW)
MLA = deepseek_cells.MLA
CONTIGUOUS = {"sequence_layout": "contiguous"}

GROUPED = [
    *(Cell(name=f"cp2 {name}", model=MOE, mesh=CP2, recipe=over(name)) for name in PROTOCOLS),
    *(Cell(name=f"components cp2 {name}", model=MOE, mesh=CP2, recipe={**COMPONENTS, **over(name)}) for name in PROTOCOLS),
    *(
        Cell(name=f"cp2 {name} contiguous", model=MOE, mesh=CP2, recipe=over(name, **CONTIGUOUS))
        for name in ("allgather", "ring")
    ),
    Cell(name="cp2 ulysses with 1 kv head", model=ONE_HEAD, mesh=CP2, recipe=over("ulysses")),
    Cell(name="cp4 ulysses with 2 kv heads", model=MOE, mesh=CP4, recipe=over("ulysses")),
    Cell(name="cp4 allgather", model=MOE, mesh=CP4),
    Cell(name="cp4 ring zigzag", model=MOE, mesh=CP4, recipe=over("ring")),
    Cell(name="cp4 hybrid zigzag packed", model=PACKED, mesh=CP4, recipe=over("hybrid", inner=2)),
    Cell(name="cp4 hybrid over allgather", model=MOE, mesh=CP4, recipe=over("hybrid", inner=2, outer="allgather")),
    Cell(name="cp2 full recompute", model=MOE, mesh=CP2, recipe=FULL),
    Cell(name="cp2 ring selective recompute", model=MOE, mesh=CP2, recipe={**SELECTIVE, **over("ring")}),
    Cell(name="cp2 selective recompute", model=MOE, mesh=CP2, recipe=SELECTIVE),
    Cell(name="cp2 two micro-batches", model=MOE, mesh=CP2, micro_batches=2),
    Cell(name="cp2 tp2", model=MOE, mesh=CP2_TP2),
    Cell(name="cp2 tp2 sp-off ring", model=MOE, mesh=Topology(cp=2, tp=2, sequence_parallel=False), recipe=over("ring")),
    Cell(name="tp2 cp2 ulysses", model=MOE, mesh=CP2_TP2, recipe=over("ulysses")),
    Cell(name="fsdp2 cp2", model=MOE, mesh=Topology(cp=2, dp_shard=2)),
    Cell(name="dp2 cp2 ring", model=MOE, mesh=Topology(cp=2, dp_replicate=2), recipe=over("ring")),
    Cell(name="cp2 ring fp32", model=MOE, mesh=CP2, recipe=over("ring"), precision="float32"),
    Cell(name="cp2 bf16", model=MOE, mesh=CP2, precision="bfloat16"),
    Cell(name="cp2 ring bf16", model=MOE, mesh=CP2, recipe=over("ring"), precision="bfloat16"),
    Cell(name="ep2 cp2", model=MOE, mesh=Topology(cp=2, ep=2)),
    Cell(name="fsdp2 ep2 cp2", model=MOE, mesh=Topology(dp_shard=2, cp=2, ep=2)),
    Cell(name="tp2 cp2 ep4 fsdp2", model=MOE, mesh=Topology(dp_shard=2, cp=2, tp=2, ep=4)),
]
PACKING = [
    Cell(name="packed documents, one process", model=PACKED),
    Cell(name="packed documents, components", model=PACKED, recipe=COMPONENTS),
    Cell(name="packed documents, two micro-batches on fsdp2", model=PACKED, mesh=Topology(dp_shard=2), micro_batches=2),
    Cell(name="packed documents, tp2", model=PACKED, mesh=Topology(tp=2)),
    *(Cell(name=f"cp2 {name} packed", model=PACKED, mesh=CP2, recipe=over(name)) for name in PROTOCOLS),
    Cell(name="cp2 packed, aux and z", model=PACKED, mesh=CP2, recipe=BOTH),
    Cell(
        name="cp2 ring packed, sequence aux, full recompute",
        model=PACKED,
        mesh=CP2,
        recipe={**SEQUENCE, **over("ring"), **FULL},
    ),
    Cell(name="ep2 cp2 packed, aux and z", model=PACKED, mesh=Topology(cp=2, ep=2), recipe=BOTH),
    Cell(name="fsdp2 tp2 packed, sequence aux", model=PACKED, mesh=Topology(dp_shard=2, tp=2), recipe=SEQUENCE),
]
SLIDING = [
    Cell(name="window, one process", model=WINDOW),
    Cell(name="window, components", model=WINDOW, recipe=COMPONENTS),
    *(Cell(name=f"cp2 {name} window", model=WINDOW, mesh=CP2, recipe=over(name)) for name in PROTOCOLS),
    Cell(name="cp4 ring window packed", model=PACKED_WINDOW, mesh=CP4, recipe=over("ring")),
    Cell(name="cp4 allgather contiguous window packed", model=PACKED_WINDOW, mesh=CP4, recipe=over("allgather", **CONTIGUOUS)),
]
LATENT = [
    *(Cell(name=f"deepseek cp2 {name}", model=MLA, mesh=CP2, recipe=over(name)) for name in PROTOCOLS),
    Cell(name="deepseek cp2 tp2", model=MLA, mesh=CP2_TP2),
    Cell(name="deepseek cp2 tp2 ring recompute", model=MLA, mesh=CP2_TP2, recipe={**FULL, **over("ring")}),
    Cell(name="deepseek tp2 cp2 ulysses", model=MLA, mesh=CP2_TP2, recipe=over("ulysses")),
    Cell(name="deepseek fsdp2 cp2 ring", model=MLA, mesh=Topology(dp_shard=2, cp=2), recipe=over("ring")),
    Cell(name="deepseek cp2 absorbed", model=MLA, mesh=CP2, recipe=deepseek_cells.ABSORBED),
    Cell(name="deepseek cp4 hybrid packed", model=packed(MLA), mesh=CP4, recipe=over("hybrid", inner=2)),
    Cell(
        name="deepseek cp2 tp2 packed, sequence aux, z and bias",
        model=packed(MLA),
        mesh=CP2_TP2,
        recipe=deepseek_cells.BALANCED,
    ),
    Cell(name="deepseek ep2 packed, aux", model=packed(MLA), mesh=Topology(dp_shard=2, ep=2), recipe=deepseek_cells.AUX),
    Cell(name="deepseek cp2 ep2", model=MLA, mesh=Topology(cp=2, ep=2)),
    Cell(
        name="deepseek tp2 cp2 ep4 fsdp2, sequence aux, z and bias",
        model=MLA,
        mesh=Topology(dp_shard=2, cp=2, tp=2, ep=4),
        recipe=deepseek_cells.BALANCED,
    ),
    Cell(
        name="deepseek cp2 sequence aux, z and bias, recompute", model=MLA, mesh=CP2, recipe={**deepseek_cells.BALANCED, **FULL}
    ),
    Cell(
        name="deepseek cp2 tp2 sp-off, aux",
        model=MLA,
        mesh=Topology(cp=2, tp=2, sequence_parallel=False),
        recipe={**deepseek_cells.AUX, **over("ulysses")},
    ),
]
CELLS = [*GROUPED, *PACKING, *SLIDING, *LATENT]
