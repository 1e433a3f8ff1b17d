"""Are a checkpoint's weights finite, in the file and in the parameters' dtypes? A model with others cannot train."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hp_core.errors import CheckpointError
from hp_core.state.check import EXACT, Source
from hp_core.state.files import CheckpointFiles
from hp_core.state.manifest import some


def check_finite(sources: Iterable[Source], files: CheckpointFiles) -> None:
    """Raise HP803 if a parameter among ``sources`` is not finite in the file, or is not once it has its own dtype.

    Each file tensor is read once. Buffers are not looked at: a mask holds infinities on purpose.
    """
    stored: list[str] = []
    rounded: list[str] = []
    with files.reader() as reader:
        for source in sources:
            entry = source.entry
            for piece in source.pieces if entry.dtype in EXACT and not entry.buffer else ():
                for value, becomes in _extremes(reader.read(piece.key), dtype=getattr(torch, entry.dtype)):
                    if not math.isfinite(value):
                        stored.append(f"{piece.key} holds {value}")
                        break
                    if not math.isfinite(becomes):
                        rounded.append(f"{piece.key} holds {value:.3g}, which is {becomes} in {entry.dtype}")
                        break
    if stored or rounded:
        fix = "use another checkpoint" if stored else "set model.dtype to bfloat16 or float32"
        what = f"checkpoint {files.folder} has weights that are not finite: {some(stored + rounded)}"
        raise CheckpointError("HP803", what, expected="finite values, since no others can train", fix=fix)


def _extremes(tensor: Tensor, *, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Return the least and the greatest value of ``tensor``, each also as ``dtype`` rounds it; NaN if it holds one.

    Rounding keeps the order, so if these two stay finite, all do.
    """
    if not tensor.numel():
        return []
    ends = torch.stack(tensor.aminmax())
    return list(zip(ends.tolist(), ends.to(dtype).tolist(), strict=True))
