"""Cells of the equivalence check as data: a model, a batch, a mesh, settings, and what comparing them found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from hp_core.mesh.topology import Topology

Precision = Literal["float64", "float32", "bfloat16"]
_ROUTERS = ("aux", "router_z", "bias_update_rate")  # of the recipe's loss


@attrs.frozen(kw_only=True)
class ModelCase:
    """A small model and a batch for it; everything random, from one seed.

    - ``adapter``: name of the adapter; ``config``: the Hugging Face configuration.
    - ``rows``, ``sequence``: shape of the whole batch of one step. The first half of the rows has a label for every token,
      the second half for hardly any, so that a mean of means shows.
    - ``freeze``: fnmatch patterns of parameters that are not trained.
    - ``reachable``: how many experts, the first ones, tokens may choose from; None is all of them.
    - ``packed``: every row is several documents, of lengths from 1 on; the reference computes each by itself.
    - ``routers``: keys of the recipe's ``loss`` that ask something of routers, ``parts``: the rows of each micro-batch, which
      such losses depend on; none is one of all rows.
    """

    adapter: str
    config: Mapping[str, Any] = attrs.field(converter=dict)
    rows: int = 4
    sequence: int = 64
    packed: bool = False
    freeze: tuple[str, ...] = ()
    reachable: int | None = None
    routers: Mapping[str, Any] = attrs.field(factory=dict, converter=dict)
    parts: tuple[tuple[int, ...], ...] = ()

    def key(self) -> str:
        """Return a short name of the case's content, for files."""
        text = json.dumps(attrs.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@attrs.frozen(kw_only=True)
class Cell:
    """One comparison: a model case on a mesh, with recipe settings besides model, mesh and precision.

    - ``micro_batches``: in how many parts each data-parallel rank computes its rows.
    - ``precision``: ``float64`` is exact (promoted, 1e-9); ``float32`` takes the fast paths (1e-5 against Hugging Face in
      float32); ``bfloat16`` is held against our own one-process bf16 run.
    - ``trust``: packages whose code the settings may name.
    """

    name: str
    model: ModelCase
    mesh: Topology = attrs.field(factory=Topology)
    recipe: Mapping[str, Any] = attrs.field(factory=dict, converter=dict)
    micro_batches: int = 1
    precision: Precision = "float64"
    trust: tuple[str, ...] = ()

    @property
    def case(self) -> ModelCase:
        """The model case, with what of the settings its reference must do too: router losses, on the same micro-batches."""
        loss = self.recipe.get("loss", {})
        asked = {key: loss[key] for key in _ROUTERS if key in loss and _asks(loss[key])}
        return attrs.evolve(self.model, routers=asked, parts=self._parts()) if asked else self.model

    def _parts(self) -> tuple[tuple[int, ...], ...]:
        """Return the rows of each micro-batch, over all data-parallel ranks."""
        data, count = self.mesh.data, self.micro_batches
        size = self.model.rows // data // count
        starts = [[(rank * count + part) * size for rank in range(data)] for part in range(count)]
        return tuple(tuple(start + row for start in found for row in range(size)) for found in starts)

    def recipe_data(self) -> dict[str, Any]:
        """Return the recipe, as plain data."""
        held = "float32" if self.precision == "bfloat16" else self.precision
        mesh = attrs.asdict(self.mesh)
        return {
            "model": {"adapter": self.model.adapter, "config": dict(self.model.config), "dtype": held},
            "mesh": mesh,
            "precision": {"compute": self.precision, "reduce": held},
            "freeze": list(self.model.freeze),
            **self.recipe,
        }


def _asks(setting: Any) -> bool:
    """Whether a setting of the loss, written out or not, asks anything of the routers."""
    return bool(setting["coefficient"] if isinstance(setting, Mapping) else setting)


@attrs.frozen(kw_only=True)
class Deviation:
    """The worst difference of one quantity: where, how large, and how large it may be, in the tensor's own unit."""

    quantity: str
    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the difference is small enough; one that is not a number is not."""
        return self.error <= self.allowed

    @property
    def severity(self) -> float:
        """How many times the allowed difference it is; infinite for one that is not a number."""
        ratio = self.error / self.allowed if self.allowed else (0.0 if self.error == 0 else float("inf"))
        return ratio if ratio == ratio else float("inf")

    def __str__(self) -> str:
        return f"{self.quantity} {self.name or 'value'}: {self.error:.2e} (allowed {self.allowed:.2e})"


@attrs.frozen(kw_only=True)
class CellReport:
    """What one cell found: the worst deviation of every quantity, the worst first, and facts that must agree but do not.

    ``margin``: smallest distance of a chosen expert's probability from the best one left out, in the reference.
    """

    cell: str
    deviations: tuple[Deviation, ...] = ()
    disagreements: tuple[str, ...] = ()
    margin: float = float("inf")
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether everything that was compared agrees; a report that compared nothing does not pass."""
        return bool(self.deviations) and not self.disagreements and all(item.passed for item in self.deviations)

    def worse(self, other: CellReport) -> CellReport:
        """Return the report of two ranks together."""
        worst: dict[str, Deviation] = {}
        for item in (*self.deviations, *other.deviations):
            if item.quantity not in worst or item.severity > worst[item.quantity].severity:
                worst[item.quantity] = item
        return attrs.evolve(
            self,
            deviations=tuple(sorted(worst.values(), key=lambda item: -item.severity)),
            disagreements=tuple(dict.fromkeys((*self.disagreements, *other.disagreements))),
            seconds=max(self.seconds, other.seconds),
        )

    def __str__(self) -> str:
        lines = [f"{self.cell}: {'ok' if self.passed else 'FAILED'} ({self.seconds:.1f} s, margin {self.margin:.1e})"]
        lines += [f"  {text}" for text in self.disagreements]
        lines += [f"  {'ok' if item.passed else 'FAILED'} {item}" for item in self.deviations]
        return "\n".join(lines)
