"""PrecisionScheme: which dtype each kind of computation runs in."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from hp_core.contracts.converters import as_dict, as_tuple


@attrs.frozen(kw_only=True)
class PrecisionScheme:
    """A registered precision scheme.

    - ``compute``: dtype name of everything that is not named below.
    - ``roles``: role of a family or of an adapter's layout rule (``"router"``, ``"norm"``, ``"head"``) -> another dtype.
    - ``modules``: family name or class name -> another dtype; goes before ``roles``.
    - ``members``: the families that support it, ``"grouped_experts"``, or one of their variants, ``"grouped_experts/loop"``;
      empty: all. Modules that belong to no family take any scheme.
    - ``implementation``: lazy ``(module, compute) -> None``, for schemes that need more than a dtype. Applying a plan calls it
      once for every boundary that the scheme holds for, with the boundary's module (on the mesh, on meta, inside its
      collectives) and the dtype's name. It may change how the module and those below it compute; they, their parameters and
      buffers stay the very same objects under the same names (HP533).
    """

    name: str
    compute: str
    roles: Mapping[str, str] = attrs.field(factory=dict, converter=as_dict)
    modules: Mapping[str, str] = attrs.field(factory=dict, converter=as_dict)
    members: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    implementation: str | None = None
