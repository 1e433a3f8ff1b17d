"""What a run directory says about where and with what it was made."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata

import attrs
import torch

from hp_core.mesh.context import SHARING
from hp_trainer import variables
from hp_trainer.session import Session

PACKAGES = ("hp-core", "hp-trainer", "torch", "transformers", "tokenizers", "safetensors")


def environment_json(session: Session) -> str:
    """Return ``environment.json``: versions, machine, mesh, plugins and digest, trusted packages, choices for CPUs."""
    plugins, digest = session.job.recipe.declarations.digest()
    facts = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "device": str(session.mesh.device)},
        "mesh": attrs.asdict(session.job.topology),
        "shared_memory": [axis for axis in SHARING if session.mesh.axis(axis).shared is not None],
        "world": session.job.topology.world,
        "threads": torch.get_num_threads(),
        "variables": {name: os.environ.get(name) for name in variables.CPU},
        "plugins": plugins,
        "plugins_digest": digest,
        "trusted": [],
        "cpu_matmul": attrs.asdict(session.cpu_matmul),
        "command": sys.argv,
    }
    return json.dumps(facts, indent=2) + "\n"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
