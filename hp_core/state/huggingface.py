"""Hugging Face checkpoints in and out of a live, sharded model, for any mesh.

Loading: each rank reads the slices it owns, and no others, out of the mapped files. Saving: all ranks take part in putting
a parameter together, rank 0 writes it. Load then save returns the same keys, shapes and bytes.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from hp_core.contracts.plan import BuildPlan
from hp_core.errors import CheckpointError
from hp_core.mesh.context import MeshContext
from hp_core.state.check import Agreement, Source, check
from hp_core.state.files import CheckpointFiles, Reader, open_checkpoint
from hp_core.state.finite import check_finite
from hp_core.state.full import live_tensors
from hp_core.state.manifest import Manifest, Piece, make_manifest, some
from hp_core.state.ranks import agree
from hp_core.state.slices import assemble, fill
from hp_core.state.transforms import Block, forward, inverse
from hp_core.state.write import Draft, plan_shards, to_json

log = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class LoadReport:
    """What loading did: the number of parameters and buffers filled, the file keys left out on purpose, and notes.

    A note names tensors whose values were rounded because the parameter's dtype is narrower than the file's.
    """

    tensors: int
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_hf(model: nn.Module, plan: BuildPlan, mesh: MeshContext, *, path: str | Path) -> LoadReport:
    """Fill every parameter and saved buffer of ``model`` from the Hugging Face checkpoint in folder ``path``.

    ``model`` lies on ``mesh`` as ``plan`` says and has memory (it was materialised); all ranks must call this. The whole
    checkpoint is compared with the plan first: on any :class:`CheckpointError` (HP801 to HP804, HP806, HP807) the model is
    unchanged, on every rank.
    """
    manifest, live = make_manifest(plan), live_tensors(model, plan)
    files, agreement = _checked(manifest, path, mesh=mesh)
    if agreement.ignored:
        log.warning("%d tensors left out, which the model does not build: %s", len(agreement.ignored), some(agreement.ignored))
    for line in agreement.notes:
        log.warning("%s", line)
    with files.reader() as reader:
        for source in agreement.sources:
            parameter, steps = live[source.entry.parameter], source.entry.steps
            for block in forward(steps, _blocks(source, reader), shape=tuple(parameter.shape)):
                fill(parameter, block)
    return LoadReport(tensors=len(agreement.sources), ignored=agreement.ignored, notes=agreement.notes)


def save_hf(
    model: nn.Module,
    plan: BuildPlan,
    mesh: MeshContext,
    *,
    path: str | Path,
    extra_files: Mapping[str, bytes] = {},
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Write ``model`` to the new folder ``path`` as a checkpoint that ``from_pretrained`` loads. All ranks must call this.

    Writes ``config.json``, ``model.safetensors`` (or shards of at most ``max_shard_size`` bytes and their index) and
    ``extra_files`` (name to content; a tokenizer's files). ``path`` appears complete or not at all: on HP805 (it exists and
    is not empty, the disk is full) nothing is left behind and every rank raises.
    """
    manifest, live = make_manifest(plan), live_tensors(model, plan)
    rank_0 = mesh.rank == 0
    with Draft(Path(path), plan_shards(manifest, max_size=max_shard_size), active=rank_0) as draft:
        agree(draft.error, world=mesh.topology.world)
        for parameter, entries in itertools.groupby(manifest.entries, lambda entry: entry.parameter):
            whole = assemble(live[parameter])
            for entry in entries:
                tensor = inverse(entry.steps, whole).to(getattr(torch, entry.dtype))
                for piece in entry.pieces:
                    draft.add(piece.key, _place(piece, tensor))
        draft.commit({"config.json": to_json(_config(model, plan)), **extra_files})
        agree(draft.error, world=mesh.topology.world)


def _checked(manifest: Manifest, path: str | Path, *, mesh: MeshContext) -> tuple[CheckpointFiles, Agreement]:
    """Return the checkpoint's files and how they fill the manifest, or raise on every rank.

    The ranks share the reading of all values.
    """
    world = mesh.topology.world
    try:
        files = open_checkpoint(path)
        found = files, check(manifest, files)
        check_finite(found[1].sources[mesh.rank :: world], files)
    except CheckpointError as error:
        agree(error, world=world)
        raise
    agree(None, world=world)
    return found


def _blocks(source: Source, reader: Reader) -> Iterator[Block]:
    """Yield the pieces of Hugging Face's runtime tensor of one entry, mapped and not read."""
    for piece in source.pieces:
        tensor, start = reader.read(piece.key), [0] * len(source.entry.shape)
        if piece.expert is not None:
            tensor, start[0] = tensor.unsqueeze(0), piece.expert
        if piece.dim is not None:
            start[piece.dim] = piece.start
        yield Block(tensor, tuple(start))


def _place(piece: Piece, whole: Tensor) -> Tensor:
    """Return the part of a runtime tensor that ``piece`` is, as a view of the piece's shape."""
    if piece.dim is not None:
        whole = whole.narrow(piece.dim, piece.start, piece.length)
    return whole if piece.expert is None else whole[piece.expert]


def _config(model: nn.Module, plan: BuildPlan) -> dict[str, Any]:
    """Return the fields of ``config.json``: the model's, over those that only the checkpoint it came from has."""
    original = _original(plan.checkpoint)
    config = {**original, **json.loads(model.config.to_json_string())}  # type: ignore[operator, union-attr]
    config["use_cache"] = original.get("use_cache", True)  # switched off while training, of no concern to the files
    return {**config, "architectures": [plan.model_class.rpartition(":")[2]], "dtype": plan.model_dtype}


def _original(checkpoint: str | None) -> dict[str, Any]:
    path = Path(checkpoint or "") / "config.json"
    if checkpoint is None or not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
