"""What a step is measured of: our planned model on its mesh, and Hugging Face's own, each with forward, backward and AdamW.

A subject is built from a workload; ``step()`` runs one optimizer step and returns the whole batch's loss.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from workload import DTYPES, KINDS, Workload, document_mask, hugging_face_loss

from hp_core import apply, build
from hp_core.applier.gradients import clipped_step, gradient_norm
from hp_core.applier.sequence import local_sequence
from hp_core.mesh.context import MeshContext, start_single
from hp_core.mesh.topology import Topology
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe
from hp_core.testing.reference import Batch
from hp_trainer.optimizer import parameter_groups

LEARNING_RATE, MAX_NORM = 1e-4, 1.0


class Subject(Protocol):
    """Something that makes steps: ``model`` holds this rank's parameters."""

    model: Any

    def step(self) -> float:
        """Run one optimizer step and return the whole batch's loss before it."""


def components(kind: str) -> list[dict[str, Any]]:
    """Return the recipe's overrides: the blocks that the adapter does not replace by itself."""
    family = {"qwen3": "Qwen3Moe", "dsv3": "DeepseekV3"}[kind]
    norms = ["model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"]
    found: list[tuple[list[str], str, str, dict[str, Any]]] = [(norms, "rms_norm", f"{family}RMSNorm", {})]
    gates = ["model.layers.*.mlp.gate"]
    if kind == "qwen3":
        found.append((["model.layers.*.self_attn"], "gqa_attention", f"{family}Attention", {}))
        found.append((gates, "topk_router", f"{family}TopKRouter", {}))
    else:
        found.append((["model.layers.0.mlp", "model.layers.*.mlp.shared_experts"], "swiglu_mlp", f"{family}MLP", {}))
        found.append((gates, "topk_router", f"{family}TopkRouter", {"scoring": "sigmoid"}))
    return [
        {"match": match, "replace": {"kind": "module", "implementation": name, "source_type": cls, "with": arguments}}
        for match, name, cls, arguments in found
    ]


def recipe_data(workload: Workload, topology: Topology, *, device: str) -> dict[str, Any]:
    """Return the recipe: fp32 parameters with ``workload.dtype`` compute under FSDP, else parameters of that dtype.

    With ep, parameters are held as by the other workers, in the compute dtype.
    """
    cut = topology.fsdp * topology.dp_replicate > 1 and topology.ep == 1
    dtype = DTYPES[workload.dtype]
    return {
        "model": {"adapter": KINDS[workload.kind], "config": workload.sizes, "dtype": "float32" if cut else dtype},
        "precision": {"compute": dtype, "reduce": "float32"},
        "overrides": components(workload.kind),
        "mesh": {axis: getattr(topology, axis) for axis in ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate")},
        "device": device,
    }


class Planned:
    """Our model through planner and applier, all that a training step has: clipping, the norm and the loss of all ranks."""

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        *,
        sets: Sequence[str] = (),
        device: str = "cpu",
        weights: Path | None = None,
    ) -> None:
        self.workload = workload
        self.recipe = load_recipe_data(recipe_data(workload, topology, device=device), sets=sets)
        start_job(topology.world, device=device)
        self.mesh = MeshContext.create(self.recipe.topology(topology.world), device=device)
        built = build(self.recipe, mesh=self.mesh)
        self.plan = built.plan
        self.model: Any = apply(built.model, built.plan, self.mesh, weights=weights)
        self._take(workload.batch())
        groups = parameter_groups((p for p in self.model.parameters() if p.requires_grad), weight_decay=0.01)
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def _take(self, batch: Batch) -> None:
        """Keep this rank's part of the batch, and the number of labels in all of it."""
        data = self.mesh.data
        if len(batch.labels) % data.size:
            raise SystemExit(f"{len(batch.labels)} rows cannot be divided over {data.size} data-parallel ranks")
        mine = batch.rows(slice(*(len(batch.labels) // data.size * place for place in (data.rank, data.rank + 1))))
        self.labels_of_all = batch.tokens

        def local(tensor: Tensor) -> Tensor:
            return local_sequence(tensor, self.plan, self.mesh).to(self.mesh.device)

        self.inputs = {"input_ids": mine.input_ids, "position_ids": mine.position_ids, "hp_labels": mine.labels}
        if mine.document_ids is not None:
            self.inputs["document_ids"] = mine.document_ids
        self.inputs = {name: local(tensor) for name, tensor in self.inputs.items()}

    def loss(self) -> Tensor:
        """Return the rank's share of the loss: the sum of its token losses over the global number of labels."""
        losses: Tensor = self.model(**self.inputs).logits
        return losses.sum() / self.labels_of_all

    def whole(self, loss: Tensor) -> float:
        """Return the loss of the whole batch, given this rank's share of it."""
        loss = loss.detach().clone()
        if self.mesh.tokens.size > 1:
            dist.all_reduce(loss, group=self.mesh.tokens.group)
        return float(loss)

    def step(self) -> float:
        """Run one optimizer step and return the whole batch's loss."""
        loss = self.loss()
        loss.backward()
        with record_function("clipping"):
            norm = gradient_norm(self.model.parameters())
            float(norm)
        clipped_step(self.optimizer, norm=norm, max_norm=MAX_NORM)
        self.optimizer.zero_grad()
        return self.whole(loss)


class HuggingFace:
    """The unmodified Hugging Face model as other workers run it: SDPA, grouped experts, FSDP2 by layer over several ranks."""

    def __init__(self, workload: Workload, *, world: int = 1, device: str = "cpu", weights: Path | None = None) -> None:
        self.workload, dtype = workload, getattr(torch, DTYPES[workload.dtype])
        start_job(world, device=device)
        cls = workload.model_class
        options = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
        held = torch.float32 if world > 1 else dtype
        if weights is not None:
            self.model = cls.from_pretrained(weights, dtype=held, **options)
        else:
            torch.manual_seed(0)
            config = cls.config_class(**workload.sizes, use_cache=False)
            self.model = cls._from_config(config, dtype=held, **options)
        self.model.to(device).train()
        batch, rank = workload.batch(), 0
        if world > 1:
            rank = shard_by_layer(self.model, dtype=dtype)
        rows = len(batch.labels) // world
        batch = batch.rows(slice(rank * rows, (rank + 1) * rows))
        self.batch = moved(batch, device=device)
        self.mask = document_mask(self.batch, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=device != "cpu" or None)

    def loss(self) -> Tensor:
        """Return the mean loss of this rank's rows."""
        return hugging_face_loss(self.model, self.batch, self.mask)

    def step(self) -> float:
        """Run one optimizer step and return this rank's loss."""
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def start_job(world: int, *, device: str = "cpu") -> int:
    """Join the job's process group unless that has been done; return the rank."""
    if world == 1:
        start_single(device)
    elif not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def shard_by_layer(model: Any, *, dtype: torch.dtype) -> int:
    """Cut a Hugging Face model by FSDP2, layer by layer, computing in ``dtype`` and reducing in fp32; return the rank."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return dist.get_rank()


def moved(batch: Batch, *, device: str) -> Batch:
    """Return the batch on a device."""
    ids = None if batch.document_ids is None else batch.document_ids.to(device)
    tensors = {name: getattr(batch, name).to(device) for name in ("input_ids", "labels", "position_ids")}
    return Batch(**tensors, document_ids=ids)


def load_recipe_data(data: dict[str, Any], *, sets: Sequence[str]) -> Any:
    """Return the recipe of plain data with ``sets`` applied."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(data, file)
        file.flush()
        return load_recipe(file.name, plugins=load_plugins(), sets=sets)


def shared_weights(workload: Workload, *, world: int) -> tuple[Path, float]:
    """Write random weights to a folder that all ranks read; return it and the top-k margin, which only rank 0 knows."""
    rank = dist.get_rank()
    folder, margin = [tempfile.mkdtemp(prefix="hp-step-time-") if rank == 0 else ""], float("nan")
    if rank == 0:
        margin = workload.write_weights(Path(folder[0]))
    if world > 1:
        dist.broadcast_object_list(folder, src=0)
    return Path(folder[0]), margin
