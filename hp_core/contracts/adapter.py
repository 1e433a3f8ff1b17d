"""ModelAdapter: everything a plugin declares for one model architecture. Torch-free; all code behind lazy references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from hp_core.contracts.converters import as_dict, as_patterns, as_tuple
from hp_core.contracts.parallel import NativeParallelBindingRequest

Role = Literal["embedding", "norm", "attention", "router", "experts", "mlp", "head"]  # what a module is for a precision scheme


@attrs.frozen(kw_only=True)
class LayoutRule:
    """Modules of ``module_class`` whose FQN matches ``match`` are boundaries described by ``provider``.

    ``provider`` is a lazy torch-free ``(ModuleInfo, LayoutContext) -> ModuleShardingSpec``. ``name`` is the key under which
    the adapter's ``counts`` says how many modules must match: more or fewer is an error, so nothing is guessed.
    A module built from a family is described by the family's own provider; the rule then only counts it. ``role`` says what
    the modules are for, so that a precision scheme can address them without knowing the model.
    """

    name: str
    module_class: str
    provider: str
    match: str = "*"
    role: Role | None = None


@attrs.frozen(kw_only=True)
class FlowRule:
    """The value that leaves ``producer`` is the one that arrives at ``consumer``; their layouts must agree.

    A port is ``"FQN pattern:argument or output"``; ``{i}`` in both patterns is the same text. ``"@residual"`` stands for
    the residual stream, ``"@input"`` for the model's own inputs [B, S] (cp on the sequence, tp replicated), ``"@output"`` for
    what leaves the model or is not used. Every declared port of every boundary is named by an entry. ``view`` says how the
    shape changes on the way: ``flatten_tokens`` turns sequence ``Shard(1)`` of [B, S, ..] into token ``Shard(0)`` of
    [T, ..]; ``unflatten_tokens`` is the reverse.
    """

    producer: str
    consumer: str
    view: Literal["flatten_tokens", "unflatten_tokens"] | None = None


@attrs.frozen(kw_only=True)
class Replacement:
    """Replace every module matching ``match`` by the registered family ``implementation``.

    ``source_type`` is the class name of the replaced module, compared as text; ``exact_type`` forbids subclasses.
    ``arguments`` are keywords of the member. Every pattern must hit, unless ``layout_rule`` names the layout rule of the
    same modules and the adapter's ``counts`` say that the configuration has none of them.
    """

    match: tuple[str, ...] = attrs.field(converter=as_patterns)
    implementation: str
    source_type: str
    exact_type: bool = False
    arguments: Mapping[str, Any] = attrs.field(factory=dict, converter=as_dict)
    layout_rule: str | None = None


@attrs.frozen(kw_only=True)
class Init:
    """How parameters and buffers whose FQN matches ``match`` are filled when there is no checkpoint.

    ``normal`` (mean 0, standard deviation ``value``, or the configuration key ``config_key``), ``constant`` (``value``), or
    ``computed`` (lazy ``function(model, fqn) -> Tensor``; for non-persistent buffers such as rotary frequencies, which are
    recomputed also when there is a checkpoint). The first matching entry wins.
    """

    match: str
    kind: Literal["normal", "constant", "computed"]
    value: float = 0.0
    config_key: str | None = None
    function: str | None = None


@attrs.frozen(kw_only=True)
class Stack:
    """The repeated part of the model: FQN of the ``ModuleList``, of what comes before it and after it, in order."""

    layers: str
    before: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    after: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)


@attrs.frozen(kw_only=True)
class Router:
    """How the model's routers score experts: what losses that balance them are made of.

    Routers are the boundaries of role ``router``, with outputs ``router_logits`` [T, E] and ``router_indices`` [T, K].
    ``scoring``: ``softmax`` over all experts, or the ``sigmoid`` of each. ``bias``: name of the buffer [E] of a router that
    corrects choices and nothing else; None: they have none.
    """

    scoring: Literal["softmax", "sigmoid"]
    bias: str | None = None


@attrs.frozen(kw_only=True)
class ModelAdapter:
    """What a plugin declares for a model.

    - ``name``: canonical; ``hf_model_types`` and ``architectures`` are further names under which it is found.
    - ``model_class`` / ``config_class``: lazy Hugging Face classes.
    - ``requires``: distribution -> version range, e.g. ``{"transformers": ">=5.20,<6"}``; enforced when a model is built.
    - ``config_checks``: lazy torch-free ``(config: dict, topology) -> list[Problem]``.
    - ``layout`` + ``counts`` (lazy ``(config) -> {rule name: count}``), ``residual`` (lazy ``(LayoutContext) -> Layout``
      of [B, S, H]), ``flow``: how the model lies on the mesh.
    - ``replacements``: modules that the adapter always replaces. ``protocols``: protocols it can use, as ``"kind:name"`` or
      ``"kind:*"``. ``bindings``: modules of the model's own classes that communicate over cp or ep.
    - ``loss``: FQN of the component that takes ``hp_labels`` (a ``linear_cross_entropy``).
    - ``checkpoint``: lazy ``(config) -> CheckpointMapping`` between Hugging Face's runtime names and file keys.
    - ``init``: covers every parameter and every buffer.
    - ``fp32``: FQN patterns of modules computed in fp32, each its own FSDP unit (routers).
    - ``isolated_subtrees``: FQN patterns laid out by somebody else: tp-replicated, no boundaries.
    - ``stack``: the repeated layers (FSDP units, recompute, pipeline). ``experts``: FQN patterns of routed experts.
    - ``router``: how routers score; None: the model has none, or their losses are not offered.
    - ``flops``: lazy torch-free ``(config, sequence) -> float``: training FLOPs per token, forward and backward.
    - ``shrink``: lazy torch-free ``(config, degrees) -> config``: the same structure with small sizes that divide by
      ``degrees`` (tp, cp, ep, pp, efsdp), for ``hp verify``.
    """

    name: str
    model_class: str
    config_class: str
    hf_model_types: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    architectures: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    requires: Mapping[str, str] = attrs.field(factory=dict, converter=as_dict)
    config_checks: str | None = None
    layout: tuple[LayoutRule, ...] = attrs.field(default=(), converter=as_tuple)
    counts: str | None = None
    residual: str | None = None
    flow: tuple[FlowRule, ...] = attrs.field(default=(), converter=as_tuple)
    replacements: tuple[Replacement, ...] = attrs.field(default=(), converter=as_tuple)
    protocols: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    bindings: tuple[NativeParallelBindingRequest, ...] = attrs.field(default=(), converter=as_tuple)
    loss: str | None = None
    checkpoint: str | None = None
    init: tuple[Init, ...] = attrs.field(default=(), converter=as_tuple)
    fp32: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    isolated_subtrees: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    stack: Stack | None = None
    experts: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    router: Router | None = None
    flops: str | None = None
    shrink: str | None = None
