"""Initial weights that do not depend on the mesh: dim 0 is drawn in blocks, each by a generator of its own."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_core.applier.shard import not_built
from hp_core.contracts.adapter import Init
from hp_core.contracts.plan import BuildPlan, ParameterPlan
from hp_core.contracts.transform import AddScalar
from hp_core.errors import PlanError
from hp_core.plugins.lazy import load
from hp_core.state.slices import assign, owned_region

BLOCK = 2**20  # elements of a block, at least one row; a constant, or meshes and versions would disagree


def initialise(model: nn.Module, plan: BuildPlan) -> None:
    """Fill every parameter as its ``Init`` says. A rank draws only the blocks that it holds a part of. HP526.

    Components that were built before keep their weights.
    """
    seed = int(plan.options.get("seed", 0))
    for entry in not_built(plan):
        if entry.init is None:
            raise PlanError("HP526", f"nothing initialises the parameter {entry.fqn}")
        parameter = model.get_parameter(entry.fqn)
        with torch.no_grad():
            _fill(model, parameter, entry, entry.init, seed=seed, config=plan.config)


def block_generator(seed: int, fqn: str, block: int) -> torch.Generator:
    """Return the generator that draws block ``block`` of a parameter, the same on every platform."""
    digest = hashlib.sha256(f"{seed}:{fqn}:{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def deviation(init: Init, config: Mapping[str, Any]) -> float:
    """Return the standard deviation of a normal ``Init``; HP526 if the configuration lacks the key it names."""
    if init.config_key is None:
        return init.value
    if init.config_key not in config:
        raise PlanError("HP526", f"the configuration has no {init.config_key!r}", expected=f"it, for init {init.match!r}")
    return float(config[init.config_key])


def _fill(
    model: nn.Module, parameter: Tensor, entry: ParameterPlan, init: Init, *, seed: int, config: Mapping[str, Any]
) -> None:
    if init.kind == "computed":
        assign(parameter, load(str(init.function))(model, entry.fqn))
        return
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if init.kind == "constant":
        local.fill_(init.value)
    else:
        std = deviation(init, config)
        for place, part in drawn_parts(parameter, entry.fqn, seed=seed):
            local[place].copy_(part * std)
    offset = sum(step.value for step in entry.transforms if isinstance(step, AddScalar))
    if offset:
        local.add_(offset)


def drawn_parts(parameter: Tensor, fqn: str, *, seed: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows of the local tensor, their standard normal values) for a parameter of any placement."""
    shape = tuple(parameter.shape) or (1,)
    starts, sizes = owned_region(parameter) if parameter.dim() else ([0], [1])
    height = max(1, BLOCK // max(1, math.prod(shape[1:])))
    row, end = starts[0], starts[0] + sizes[0]
    while row < end and all(sizes):
        block = row // height
        rows = min(height, shape[0] - block * height)
        values = torch.empty((rows, *shape[1:]), dtype=torch.float32)
        values.normal_(generator=block_generator(seed, fqn, block))
        stop = min(end, block * height + rows)
        values = values[row - block * height : stop - block * height]
        for dim, (start, size) in enumerate(zip(starts[1:], sizes[1:], strict=True), start=1):
            values = values.narrow(dim, start, size)
        yield slice(row - starts[0], stop - starts[0]), values if parameter.dim() else values.reshape(1)
        row = stop
