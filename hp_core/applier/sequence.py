"""The part of a sequence that this rank computes, for whoever feeds a model under context parallelism."""

from __future__ import annotations

import torch
from torch import Tensor

from hp_core.contracts.plan import BuildPlan
from hp_core.errors import PlanError
from hp_core.mesh.context import MeshContext
from hp_core.mesh.sequence import Span, sequence_parts, sequence_spans


def local_spans(plan: BuildPlan, mesh: MeshContext, *, length: int) -> tuple[Span, ...]:
    """Return the spans of a sequence of ``length`` tokens that this rank's cp place holds, in order; all of it without cp.

    HP502: a length that the protocol's order cannot cut into equal parts.
    """
    protocol = plan.protocol("cp")
    if protocol is None:
        return ((0, length),)
    cp, inner = mesh.axis("cp"), list(protocol.sub_axes.values())[-1] if protocol.sub_axes else 1
    parts = sequence_parts(cp=cp.size, layout=protocol.sequence_layout, inner=inner)
    if length % parts:
        what = f"a sequence of {length} tokens cannot be cut over cp ({cp.size})"
        fix = f"pad it to {-(-length // parts) * parts} tokens, those without label"
        raise PlanError("HP502", what, expected=f"a multiple of {parts}", where=f"protocol cp:{protocol.name}", fix=fix)
    return sequence_spans(length, cp=cp.size, rank=cp.rank, layout=protocol.sequence_layout, inner=inner)


def local_sequence(tensor: Tensor, plan: BuildPlan, mesh: MeshContext, *, dim: int = 1) -> Tensor:
    """Return this rank's part of ``tensor`` along its sequence ``dim``, in the order that the cp protocol wants.

    For token ids, labels (shifted before the cut), global positions and document ids; ranks of a tp group get the same.
    HP502: a length that cannot be cut.

    Example::

        batch = [local_sequence(t, plan, mesh) for t in (input_ids, labels, position_ids)]
    """
    spans = local_spans(plan, mesh, length=tensor.shape[dim])
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
