"""Who owns which parameter: every one exactly once, the innermost boundary around it, tied ones with equal layouts."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import attrs

from hp_core.contracts import Inventory, Layout, Replicate, TensorInfo, View
from hp_core.contracts.placement import AXES, describe, placement_of
from hp_core.errors import PlanError
from hp_core.planner.describe import Described, ancestors, nearest


@attrs.frozen(kw_only=True)
class Owned:
    """A parameter (by one of its names) with its owner's FQN, its path below the owner, its layout and its view."""

    fqn: str
    tensor: TensorInfo
    owner: str
    path: str
    layout: Layout
    view: View | None = None


def assign_owners(inventory: Inventory, described: Sequence[Described], *, isolated: Iterable[str]) -> dict[str, Owned]:
    """Return every parameter name of the model, aliases included, with its owner, in inventory order.

    Parameters of isolated subtrees are replicated and owned by the subtree. HP521: owned by nobody, or by another
    boundary than the innermost one around it; tied parameters laid out differently.
    """
    boundaries = {item.info.fqn: item for item in described}
    _check_declared(boundaries)
    isolated = tuple(isolated)
    owned: dict[str, Owned] = {}
    for info in inventory.modules:
        for name, tensor in info.parameters.items():
            fqn = f"{info.fqn}.{name}" if info.fqn else name
            owned[fqn] = _own(fqn, tensor, module=info.fqn, boundaries=boundaries, isolated=isolated)
    for alias, canonical in inventory.aliases.items():
        if alias not in owned:  # its module lies in several places and is listed by its first name
            owned[alias] = attrs.evolve(owned[canonical], fqn=alias)
    _check_tied(inventory.aliases, owned)
    return owned


def _check_declared(boundaries: Mapping[str, Described]) -> None:
    """Raise HP521 where a nearer boundary owns a declared parameter."""
    for fqn, item in boundaries.items():
        for path in item.spec.params:
            holder = f"{fqn}.{path}".rpartition(".")[0] if fqn else path.rpartition(".")[0]
            owner = nearest(holder, boundaries)
            if owner != fqn:
                raise PlanError(
                    "HP521",
                    f"{fqn} declares {path!r}, which lies in the boundary {owner}",
                    expected="the innermost boundary to declare it",
                    where=item.declared_by,
                    fix=item.fix,
                )


def _own(fqn: str, tensor: TensorInfo, *, module: str, boundaries: Mapping[str, Described], isolated: tuple[str, ...]) -> Owned:
    subtree = _isolated_root(module, isolated)
    if subtree is not None:
        return Owned(fqn=fqn, tensor=tensor, owner=subtree, path=_below(fqn, subtree), layout={"tp": Replicate()})
    owner = nearest(module, boundaries)
    assert owner is not None, fqn  # describe_modules refuses parameters outside every boundary
    spec, path = boundaries[owner].spec, _below(fqn, owner)
    if path not in spec.params:
        raise PlanError(
            "HP521",
            f"nobody owns {fqn}: the boundary {owner or 'root'} does not declare {path!r}",
            expected="a layout for every parameter of the boundary",
            where=boundaries[owner].declared_by,
            fix=boundaries[owner].fix,
        )
    return Owned(fqn=fqn, tensor=tensor, owner=owner, path=path, layout=spec.params[path], view=spec.views.get(path))


def _isolated_root(module: str, patterns: tuple[str, ...]) -> str | None:
    """Return the outermost module around ``module`` that an ``isolated_subtrees`` pattern matches."""
    if not patterns:
        return None
    hits = [name for name in (module, *ancestors(module)) if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    return hits[-1] if hits else None


def _below(fqn: str, owner: str) -> str:
    return fqn[len(owner) + 1 :] if owner else fqn


def _check_tied(aliases: Mapping[str, str], owned: Mapping[str, Owned]) -> None:
    for alias, canonical in aliases.items():
        one, other = owned[canonical], owned[alias]
        equal = all(placement_of(one.layout, axis) == placement_of(other.layout, axis) for axis in AXES)
        if not equal or one.view != other.view:
            raise PlanError(
                "HP521",
                f"{alias} ({describe(other.layout)}) is tied to {canonical} ({describe(one.layout)})",
                expected="equal layouts and views for tied parameters",
            )
