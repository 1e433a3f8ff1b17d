"""BuildPlan: what applying will do, as data. Made by ``hp_core.planner``, consumed by the applier, reports and codegen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from hp_core.contracts.adapter import Init
from hp_core.contracts.checkpoint import CheckpointMapping
from hp_core.contracts.converters import as_dict, as_tuple
from hp_core.contracts.frozen import frozen_mapping
from hp_core.contracts.parallel import ParallelModuleSpec
from hp_core.contracts.placement import Layout, View
from hp_core.contracts.sharding import ModuleShardingSpec
from hp_core.contracts.traffic import Traffic
from hp_core.contracts.transform import Transform
from hp_core.mesh.topology import Topology

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "split", "identity"]


@attrs.frozen(kw_only=True)
class CollectivePlan:
    """One collective on one port of a boundary, with its adjoint.

    ``when`` is ``enter`` or ``exit``; ``dim`` is the tensor dim for gather, scatter and split; ``elements`` is the logical
    element count of the tensor (whole, per data-parallel rank), ``forward_bytes`` and ``backward_bytes`` what one rank sends,
    all 0 where the port's shape is not declared. ``backward`` is None where no gradient comes back: integers, and what is
    computed from the model's inputs without parameters.
    """

    port: str
    when: Literal["enter", "exit"]
    axis: str
    forward: CollectiveKind
    backward: CollectiveKind | None
    dim: int | None = None
    elements: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0

    @property
    def bytes(self) -> int:
        """What one rank sends in the forward and the backward."""
        return self.forward_bytes + self.backward_bytes


@attrs.frozen(kw_only=True)
class BoundaryPlan:
    """One boundary: its module, its declaration, whether its body is varying on tp, and its compiled collectives.

    ``compute``: dtype that floating inputs are cast to on entry (modules computed in fp32); None leaves them alone.
    """

    fqn: str
    cls: str
    spec: ModuleShardingSpec
    declared_by: str
    varying: bool = False
    compute: str | None = None
    collectives: tuple[CollectivePlan, ...] = attrs.field(default=(), converter=as_tuple)
    family: str | None = None
    parallel: ParallelModuleSpec | None = None


@attrs.frozen(kw_only=True)
class ParameterPlan:
    """One parameter, by its canonical FQN.

    ``layout`` is its model-parallel placement; ``gradient`` the placement of the gradient that the body produces (rule 3 of
    the gradient convention): a Partial there is completed by the view. ``shape`` is the global runtime shape (after
    ``transforms``); ``owner`` the FQN of the boundary that declares it; ``aliases`` its further names (tied weights).
    """

    fqn: str
    owner: str
    shape: tuple[int, ...] = attrs.field(converter=as_tuple)
    dtype: str
    layout: Layout = attrs.field(factory=dict, converter=as_dict)
    gradient: Layout = attrs.field(factory=dict, converter=as_dict)
    trainable: bool = True
    aliases: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    view: View | None = None
    transforms: tuple[Transform, ...] = attrs.field(default=(), converter=as_tuple)
    init: Init | None = None


@attrs.frozen(kw_only=True)
class BufferPlan:
    """One buffer: shape, dtype, whether it is saved, and how it is filled."""

    fqn: str
    shape: tuple[int, ...] = attrs.field(converter=as_tuple)
    dtype: str
    persistent: bool
    init: Init | None = None


@attrs.frozen(kw_only=True)
class UnitPlan:
    """One FSDP unit: the module, its storage view (``dense`` or ``expert``), the dtypes of its policy, and its options.

    Units are listed inner before outer; the root (``""``) is last. ``shard_dim`` is the dim that FSDP cuts. ``wraps``: whether
    FSDP2 wraps the unit; not where it would change nothing.
    """

    fqn: str
    view: Literal["dense", "expert"] = "dense"
    compute: str
    reduce: str
    reshard_after_forward: bool = True
    shard_dim: int = 0
    wraps: bool = True


@attrs.frozen(kw_only=True)
class ReplacementPlan:
    """One installed replacement: which module or method, by which family member, on whose word.

    - ``kind``: ``module``; or ``method``, and then ``fqn`` ends in the method's name.
    - ``rule``: id of the rule, the same in every run: ``"overrides.2"``, ``"acme.replacements.0"``.
    - ``variant``, ``selectors``, ``degrees``: how the family was resolved to ``constructor``.
    - ``aliases``: further names of a module that lies in several places.
    """

    fqn: str
    source: str
    family: str
    constructor: str
    declared_by: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping)
    kind: Literal["module", "method"] = "module"
    rule: str = ""
    variant: str = "baseline"
    selectors: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping)
    degrees: Mapping[str, int] = attrs.field(factory=dict, converter=as_dict)
    aliases: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)


@attrs.frozen(kw_only=True)
class KernelPlan:
    """The kernel that computes one operator of one component, and why: ``"auto: for cpu"``, or the recipe's key.

    ``requires`` are modules that must be importable where the plan is applied.
    """

    fqn: str
    op: str
    name: str
    device: str
    implementation: str
    requires: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    reason: str


@attrs.frozen(kw_only=True)
class ProtocolPlan:
    """The protocol that modules speak over one axis of degree > 1: ``implementation`` is constructed with (mesh, options).

    ``options`` hold what the recipe chose; a module's own are added when it is bound. ``sequence_layout``: the order of tokens
    over cp; None for ep. ``sub_axes``: sub-axis of cp -> degree, outer first.
    """

    kind: Literal["cp", "ep"]
    name: str
    version: int
    implementation: str
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping)
    sequence_layout: Literal["contiguous", "zigzag"] | None = None
    sub_axes: Mapping[str, int] = attrs.field(factory=dict, converter=as_dict)


@attrs.frozen(kw_only=True)
class ProtocolTraffic:
    """What one rank sends by the protocol of an axis for each of ``modules``; None: the protocol does not say."""

    kind: Literal["cp", "ep"]
    name: str
    modules: int
    traffic: Traffic | None = None


@attrs.frozen(kw_only=True)
class SchemePlan:
    """The code that a precision scheme runs on the boundary ``fqn``, which computes in ``compute``."""

    fqn: str
    scheme: str
    implementation: str
    compute: str
    declared_by: str


@attrs.frozen(kw_only=True)
class OverrideChange:
    """What one override of the recipe changed on one module, in words for a reader.

    ``field`` is the override's field and key (``"out_dst.output"``, ``"scheme"``, ``"params"``); ``rule`` its id in the recipe.
    """

    fqn: str
    field: str
    before: str
    after: str
    declared_by: str
    rule: str


@attrs.frozen(kw_only=True)
class BuiltComponent:
    """A component that was sharded and bound on a mesh by itself; a plan that finds it in a model must agree with it.

    Names are relative to the component, whose own FQN is ``""``.
    """

    topology: Topology
    boundary: BoundaryPlan
    parameters: tuple[ParameterPlan, ...] = attrs.field(default=(), converter=as_tuple)
    protocols: tuple[ProtocolPlan, ...] = attrs.field(default=(), converter=as_tuple)


@attrs.frozen(kw_only=True)
class RecomputePlan:
    """Recompute the forward of ``fqn`` in the backward: everything (``full``) or all but matrix products (``selective``)."""

    fqn: str
    mode: Literal["full", "selective"]


@attrs.frozen(kw_only=True)
class RouterPlan:
    """What the recipe asks of the routers besides routing: losses, and balance by a correction bias.

    - ``routers``: their FQNs, in order; each has outputs ``router_logits`` [T, E] and ``router_indices`` [T, K].
    - ``scoring``: how logits become scores. ``tokens_cut``: tp ranks route different tokens.
    - ``aux``, ``aux_coefficient``, ``z_coefficient``: the losses (None, 0: not asked for).
    - ``bias_update_rate``, ``biases``: how far a step moves the correction biases, and their FQNs, one for each router.
    """

    routers: tuple[str, ...] = attrs.field(converter=as_tuple)
    scoring: Literal["softmax", "sigmoid"]
    tokens_cut: bool
    aux: Literal["hf", "sequence"] | None = None
    aux_coefficient: float = 0.0
    z_coefficient: float = 0.0
    bias_update_rate: float = 0.0
    biases: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)


@attrs.frozen(kw_only=True)
class BuildPlan:
    """Everything that applying needs; applying decides nothing.

    ``options`` holds the run-wide settings that the applier obeys: ``seed`` (int), ``loss_chunk`` (int), ``cpu_matmul``
    (``auto``: a probe chooses; ``off``).
    ``mapping`` says which file keys the parameters are stored under (the adapter's ``checkpoint``, called with the config).
    ``plugins`` lists only the plugins the plan uses, as ``"distribution version"``. ``notes`` are lines for a reader
    (defaults applied, missing axes taken as Replicate). ``overrides`` are the recipe's own, as it writes them; ``changes`` say
    what each did; ``trusted`` are the packages that the command line allowed a recipe to name code of. ``built`` are FQNs of
    boundaries that were sharded and bound before: applying leaves them as they are. ``protocols``: one for each of cp and ep
    whose degree is more than 1. ``traffic``: what each sends. ``routers``: what is asked of the routers, None: nothing.
    """

    adapter: str
    model_class: str
    topology: Topology
    model_dtype: str
    device: str
    batch: int
    sequence: int
    loss: str | None = None
    checkpoint: str | None = None
    mapping: CheckpointMapping = attrs.field(factory=CheckpointMapping)
    config: Mapping[str, Any] = attrs.field(factory=dict, converter=as_dict)
    boundaries: tuple[BoundaryPlan, ...] = attrs.field(default=(), converter=as_tuple)
    parameters: tuple[ParameterPlan, ...] = attrs.field(default=(), converter=as_tuple)
    buffers: tuple[BufferPlan, ...] = attrs.field(default=(), converter=as_tuple)
    units: tuple[UnitPlan, ...] = attrs.field(default=(), converter=as_tuple)
    replacements: tuple[ReplacementPlan, ...] = attrs.field(default=(), converter=as_tuple)
    recompute: tuple[RecomputePlan, ...] = attrs.field(default=(), converter=as_tuple)
    kernels: tuple[KernelPlan, ...] = attrs.field(default=(), converter=as_tuple)
    schemes: tuple[SchemePlan, ...] = attrs.field(default=(), converter=as_tuple)
    protocols: tuple[ProtocolPlan, ...] = attrs.field(default=(), converter=as_tuple)
    traffic: tuple[ProtocolTraffic, ...] = attrs.field(default=(), converter=as_tuple)
    routers: RouterPlan | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=as_dict)
    plugins: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    overrides: tuple[Mapping[str, Any], ...] = attrs.field(default=(), converter=as_tuple)
    changes: tuple[OverrideChange, ...] = attrs.field(default=(), converter=as_tuple)
    trusted: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    built: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    notes: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)

    @property
    def wraps(self) -> bool:
        """Whether FSDP2 wraps any unit."""
        return any(unit.wraps for unit in self.units)

    def protocol(self, kind: str) -> ProtocolPlan | None:
        """Return the protocol over ``"cp"`` or ``"ep"``; None where that degree is 1."""
        return next((protocol for protocol in self.protocols if protocol.kind == kind), None)
