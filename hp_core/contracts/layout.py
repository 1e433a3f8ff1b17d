"""LayoutContext: what a layout provider may look at besides its module. Pure and torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from hp_core.contracts.inventory import Inventory, ModuleInfo, TensorInfo
from hp_core.contracts.placement import Layout, Placement, Replicate, Shard
from hp_core.contracts.sharding import Port
from hp_core.mesh.topology import Topology


@attrs.frozen(kw_only=True)
class LayoutContext:
    """Topology, Hugging Face configuration and inventory, with the layouts that every provider needs.

    A provider declares layouts for the axes whatever their degree; degree-1 axes cost nothing.
    """

    topology: Topology
    config: Mapping[str, Any]
    inventory: Inventory

    def parameters(self, info: ModuleInfo) -> dict[str, TensorInfo]:
        """Return all parameters at or below the module, by path relative to it."""
        return self.inventory.parameters_below(info.fqn)

    @property
    def residual(self) -> Layout:
        """Layout of the residual stream [B, S, H]: cp on the sequence, and tp too under sequence parallelism."""
        return self.tokens(dim=1)

    def tokens(self, *, dim: int) -> Layout:
        """Layout of an activation between boundaries; ``dim`` is 1 for [B, S, ..] and 0 for flattened [T, ..]."""
        tp: Placement = Shard(dim) if self.topology.sequence_parallel else Replicate()
        return {"cp": Shard(dim), "tp": tp}

    def inside(self, *, dim: int, tp: Placement | None = None) -> Layout:
        """Layout of an activation inside a tp body: cp on the sequence ``dim``, ``tp`` as given (Replicate)."""
        return {"cp": Shard(dim), "tp": tp if tp is not None else Replicate()}

    def hidden(self, *, flat: bool = False) -> Port:
        """The port of hidden states: [B, S, H], or [T, H] if ``flat``."""
        size = int(self.config["hidden_size"])
        return Port(shape=("T", size) if flat else ("B", "S", size))
