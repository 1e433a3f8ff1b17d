"""Comparing gradients: ours with Hugging Face's in fp32, on any mesh, before anything is timed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from subjects import Planned, moved
from torch import Tensor
from workload import Workload, hugging_face_loss

from hp_core.state.full import full_gradients

TOLERANCE = 1e-5


@attrs.frozen(kw_only=True)
class Comparison:
    """The worst gradient: its error over its tensor's largest element, and its name."""

    worst: float
    name: str


def compare(ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> Comparison:
    """Return the worst of all gradients in ``theirs``; None on one side only, or no number, is infinite."""
    errors = [(_error(ours[name], expected), name) for name, expected in theirs.items()]
    worst, name = max(errors)
    return Comparison(worst=worst, name=name)


def _error(ours: Tensor | None, expected: Tensor | None) -> float:
    if ours is None or expected is None:
        return 0.0 if ours is expected else float("inf")
    error = float((ours.cpu() - expected.cpu()).abs().max() / expected.cpu().abs().max().clamp_min(1e-12))
    return error if error == error else float("inf")


def verify(subject: Planned, *, weights: Path, margin: float) -> None:
    """Compare loss and every gradient at 1e-5 of each tensor's largest element; all ranks call this, rank 0 prints.

    ``margin``: the smallest distance between a chosen expert's score and the best one left out, in the reference; where it is
    small, rounding would decide, and the comparison mean nothing.

    Raises:
        SystemExit: something differs by more.
    """
    share = subject.loss()
    share.backward()
    loss = subject.whole(share)
    ours = full_gradients(subject.model, subject.plan)
    if dist.get_rank() == 0:
        expected, theirs = reference_gradients(subject.workload, weights)
        found = compare(ours, theirs)
        text = f"verify: top-k margin {margin:.1e}; loss {loss:.6f} against {expected:.6f}"
        print(f"{text}; worst gradient {found.worst:.1e} ({found.name})", flush=True)
        if abs(loss - expected) > TOLERANCE * abs(expected) or found.worst > TOLERANCE:
            raise SystemExit("verify: FAILED")
    subject.optimizer.zero_grad()
    if subject.mesh.topology.world > 1:
        dist.barrier()


def reference_gradients(workload: Workload, weights: Path, *, device: str = "cpu") -> tuple[float, dict[str, Tensor | None]]:
    """Return Hugging Face's loss and gradients in fp32, with its plainest attention and experts; packed documents by mask."""
    batch = moved(workload.batch(), device=device)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = workload.model_class.from_pretrained(weights, dtype=torch.float32, **options).to(device)
    loss = hugging_face_loss(model, batch)
    loss.backward()
    return float(loss.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}
