"""Checks of a boundary's layout that need neither its module nor the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from hp_core.contracts import checks
from hp_core.contracts.checks import refuse
from hp_core.contracts.placement import AXES, HeadSlice, Partial, Placement, Replicate, Shard, View, placement_of
from hp_core.contracts.sharding import ModuleShardingSpec, Port
from hp_core.errors import suggest

_SYMBOLS = ("B", "S", "T")


def validate_sharding(spec: ModuleShardingSpec, *, where: str = "", inputs: Iterable[str] = ()) -> None:
    """Raise HP402 unless the layout keeps every rule of its contract; ``where`` names the module and its provider.

    ``inputs``: the arguments of the module's forward, where they are known, for what a misspelt name may have meant.
    """
    for check in (_check_layouts, _check_params, _check_boundary, _check_outputs, _check_sources, _check_views):
        check(spec, where)
    _check_ports(spec, where, inputs)


def _check_layouts(spec: ModuleShardingSpec, where: str) -> None:
    for field in ("params", "in_src", "in_dst", "out_src", "out_dst"):
        for name, layout in (getattr(spec, field) or {}).items():
            for axis, placement in layout.items():
                _check_placement(f"{field}[{name!r}]", axis, placement, where)


def _check_placement(named: str, axis: Any, placement: Any, where: str) -> None:
    if axis not in AXES:
        raise refuse(f"{named} names the axis {axis!r}", expected="tp, cp or ep", where=where)
    if not isinstance(placement, get_args(Placement)):
        text = f"{named} has {placement!r} on {axis}"
        raise refuse(text, expected="Shard(dim), Replicate() or Partial()", where=where)
    if isinstance(placement, Shard) and (type(placement.dim) is not int or placement.dim < 0):
        raise refuse(f"{named} has {placement} on {axis}", expected="a dim counted from the front, 0 or more", where=where)


def _check_params(spec: ModuleShardingSpec, where: str) -> None:
    for name, layout in spec.params.items():
        if not isinstance(name, str) or not name:
            raise refuse(f"params names {name!r}", expected="a parameter's path relative to the boundary", where=where)
        for axis, placement in layout.items():
            if isinstance(placement, Partial):
                text = f"params[{name!r}] is Partial on {axis}"
                raise refuse(text, expected="Shard or Replicate, since a parameter is never a summand", where=where)
    _check_unique("local_attrs", spec.local_attrs, where)


def _check_boundary(spec: ModuleShardingSpec, where: str) -> None:
    for field in ("is_boundary", "each_token"):
        if type(getattr(spec, field)) is not bool:
            raise refuse(f"{field} is {getattr(spec, field)!r}", expected="True or False", where=where)
    declared = [field for field in ("in_src", "in_dst", "out_src", "out_dst") if getattr(spec, field)]
    if declared and not spec.is_boundary:
        raise refuse(f"is_boundary is False but {declared[0]} is declared", expected="parameters only", where=where)


def _check_outputs(spec: ModuleShardingSpec, where: str) -> None:
    names = [name for name in spec.out_names if name is not None]
    _check_unique("out_names", names, where)
    for field in ("out_src", "out_dst"):
        for name in getattr(spec, field) or {}:
            if name not in names:
                text = f"{field}[{name!r}] is not an output{suggest(str(name), names)}"
                raise refuse(text, expected=f"one of out_names ({', '.join(names) or 'no names'})", where=where)


def _check_sources(spec: ModuleShardingSpec, where: str) -> None:
    for field, source, what in (("in_dst", "in_src", "on arrival"), ("out_dst", "out_src", "that the body produces")):
        known = getattr(spec, source)
        for name in getattr(spec, field) or {}:
            if name not in known:
                expected = f"the layout {what} too" + (f", beside that of {', '.join(map(str, known))}" if known else "")
                raise refuse(f"{field}[{name!r}] has no {source}", expected=expected, where=where)


def _check_views(spec: ModuleShardingSpec, where: str) -> None:
    for name, view in spec.views.items():
        if name not in spec.params:
            text = f"views[{name!r}] is not a declared parameter{suggest(str(name), spec.params)}"
            raise refuse(text, expected="one of params", where=where)
        if not isinstance(view, get_args(View)):
            raise refuse(f"views[{name!r}] is {view!r}", expected="HeadSlice(dim, parts) or FirstRank()", where=where)
        if placement_of(spec.params[name], "tp") != Replicate():
            text = f"views[{name!r}] is a {type(view).__name__} of a parameter that is {spec.params[name]['tp']} on tp"
            raise refuse(text, expected="Replicate", where=where)
        if isinstance(view, HeadSlice) and not (_is_count(view.dim + 1) and _is_count(view.parts)):
            raise refuse(f"views[{name!r}] is {view!r}", expected="dim 0 or more and parts 1 or more", where=where)


def _check_ports(spec: ModuleShardingSpec, where: str, inputs: Iterable[str]) -> None:
    known = dict.fromkeys((*spec.in_src, *spec.out_src, *(name for name in spec.out_names if name is not None)))
    for name, port in spec.ports.items():
        if name not in known and name in inputs:
            raise refuse(f"ports[{name!r}] has no in_src", expected="the layout on arrival too", where=where)
        if name not in known:
            text = f"ports[{name!r}] is neither an argument nor an output{suggest(str(name), {*known, *inputs})}"
            raise refuse(text, expected=f"a declared name ({', '.join(known)})", where=where)
        _check_port(name, port, where)


def _check_port(name: str, port: Port, where: str) -> None:
    for size in port.shape:
        if size not in _SYMBOLS and not _is_count(size):
            raise refuse(f"ports[{name!r}] has the size {size!r}", expected="a positive integer, B, S or T", where=where)
    checks.check_text(f"ports[{name!r}]", "dtype", port.dtype)


def _check_unique(field: str, names: Iterable[Any], where: str) -> None:
    seen = set()
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise refuse(f"{field} holds {name!r}", expected="a Python name", where=where)
        if name in seen:
            raise refuse(f"{field} holds {name!r} twice", expected="each once", where=where)
        seen.add(name)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
