"""ModuleShardingSpec: the layout of one boundary, as its declaration gives it."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hp_core.contracts.converters import as_dict, as_tuple
from hp_core.contracts.placement import Layout, View


def _layouts(value: Mapping[str, Layout]) -> dict[str, dict[str, object]]:
    return {name: as_dict(layout) for name, layout in as_dict(value).items()}


def _optional_layouts(value: Mapping[str, Layout] | None) -> dict[str, dict[str, object]] | None:
    return None if value is None else _layouts(value)


@attrs.frozen(kw_only=True)
class Port:
    """Logical (global) shape and dtype of a port, for byte counts and reports.

    ``shape`` mixes ints and the symbols ``B`` (batch), ``S`` (sequence) and ``T`` (tokens, B x S).
    ``dtype`` is ``"compute"`` or a fixed dtype name such as ``"int64"`` or ``"float32"``.
    """

    shape: tuple[int | str, ...]
    dtype: str = "compute"


@attrs.frozen(kw_only=True)
class ModuleShardingSpec:
    """What a boundary owns and how tensors arrive at and leave it.

    - ``params``: parameter path relative to the boundary -> layout. ``{}`` owns none.
    - ``in_src`` / ``in_dst``: forward argument -> layout on arrival / needed by the body; a difference is a collective
      before the body.
    - ``out_src`` / ``out_dst``: output -> layout that the body produces / that the consumer gets; a difference is a
      collective after it. ``out_dst=None``: none. A single output is called ``output``.
    - ``out_names``: the order of tuple outputs. ``None`` in place of a name skips an output.
    - ``is_boundary``: False means parameters only, forward untouched.
    - ``local_attrs``: integer attributes that the body sees divided by tp.
    - ``views``: parameter path -> how a replicated parameter is seen by the body (:class:`HeadSlice`, :class:`FirstRank`).
    - ``ports``: argument or output name -> :class:`Port`, for byte counts.
    - ``each_token``: the body computes each token by itself, so that with whole parameters it may be given any of them: an
      override may then cut every port on its tokens (dim ``S`` or ``T`` of its :class:`Port`).

    Example, an attention block under tensor and sequence parallelism::

        ModuleShardingSpec(
            params={"q_proj.weight": {"tp": Shard(0)}, "o_proj.weight": {"tp": Shard(1)}},
            in_src={"hidden_states": {"tp": Shard(1)}}, in_dst={"hidden_states": {"tp": Replicate()}},
            out_src={"output": {"tp": Partial()}}, out_dst={"output": {"tp": Shard(1)}}, out_names=("output", None),
        )
    """

    params: Mapping[str, Layout] = attrs.field(factory=dict, converter=_layouts)
    in_src: Mapping[str, Layout] = attrs.field(factory=dict, converter=_layouts)
    in_dst: Mapping[str, Layout] = attrs.field(factory=dict, converter=_layouts)
    out_src: Mapping[str, Layout] = attrs.field(factory=dict, converter=_layouts)
    out_dst: Mapping[str, Layout] | None = attrs.field(default=None, converter=_optional_layouts)
    out_names: tuple[str | None, ...] = attrs.field(default=("output",), converter=as_tuple)
    is_boundary: bool = True
    local_attrs: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    views: Mapping[str, View] = attrs.field(factory=dict, converter=as_dict)
    ports: Mapping[str, Port] = attrs.field(factory=dict, converter=as_dict)
    each_token: bool = False
