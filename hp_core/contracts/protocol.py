"""Protocol declarations and the abstract contexts that protocols implement. Torch-free: tensors are typed as Any."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from hp_core.contracts.converters import as_dict, as_tuple


@attrs.frozen(kw_only=True)
class Protocol:
    """How modules communicate over one axis.

    ``implementation`` is the lazy concrete :class:`CPContext` or :class:`EPContext`, constructed with ``(mesh, options)``.
    ``sequence_layout``: the order of tokens that a cp protocol wants. ``sub_axes``: names of sub-axes of cp it asks for, outer
    first. ``masks``: what a cp protocol can do, out of causal, sliding, packed. ``other_layouts``: orders of tokens that a
    recipe may ask for instead. ``backends``: those it works on; empty means all. ``validate``: lazy torch-free
    ``(options, config: dict, topology) -> list[Problem]``: what the protocol cannot do on this mesh.
    ``traffic``: lazy torch-free ``(options, config: dict, topology, (batch, sequence)) -> Traffic``: what a rank sends for one
    module; a plan without it says that it does not know.
    """

    kind: Literal["cp", "ep"]
    name: str
    version: int = 1
    implementation: str
    sequence_layout: Literal["contiguous", "zigzag"] | None = None
    sub_axes: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    masks: tuple[str, ...] = attrs.field(default=("causal",), converter=as_tuple)
    other_layouts: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    backends: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    validate: str | None = None
    traffic: str | None = None


@attrs.frozen(kw_only=True)
class SequencePartition:
    """How a sequence of ``global_length`` lies over the ranks: ``lengths`` per rank, this ``rank`` and its ``offset``."""

    lengths: tuple[int, ...] = attrs.field(converter=as_tuple)
    rank: int
    offset: int
    global_length: int


@attrs.frozen(kw_only=True)
class AttentionMask:
    """A mask as data, never a dense matrix that grows with S squared.

    ``causal``; ``window``: how many tokens a query sees back, itself included, or None; ``document_ids`` [B, S] int or None;
    ``positions`` [B, S] global positions of the local tokens or None (0 .. S-1). ``key_positions`` and ``key_document_ids``
    [B, S']: those of the keys, where the keys are not the tokens of the queries. Without positions, documents are runs of
    equal ids. B may be 1.
    """

    causal: bool = True
    window: int | None = None
    document_ids: Any = None
    positions: Any = None
    key_positions: Any = None
    key_document_ids: Any = None


@attrs.frozen(kw_only=True)
class KeyValue:
    """Keys and values as they travel: ``compact`` tensors, their sequence dim, and ``expand``, called on what arrived.

    - ``expand(*compact, *weights) -> (key [B, K, S, D], value [B, K, S, V])``: for GQA ``compact`` is (k, v) and ``expand`` the
      identity; for MLA it is (latent, rope key) and ``expand`` projects them.
    - ``weights``: tensors that ``expand`` needs besides and that do not travel, dim 0 is heads: a protocol that gives ranks
      different heads takes a part of it. All that has a gradient is in ``compact`` or ``weights``.
    - ``head_dim``: dim of the compact tensors that is heads, None where all heads share them (latents).
    """

    compact: tuple[Any, ...] = attrs.field(converter=as_tuple)
    seq_dim: int
    expand: Callable[..., tuple[Any, Any]]
    weights: tuple[Any, ...] = attrs.field(default=(), converter=as_tuple)
    head_dim: int | None = None


class CPContext(abc.ABC):
    """Transport over a borrowed one-axis cp mesh, and attention for its layout. Adjoints are exact."""

    @abc.abstractmethod
    def partition(self, local_length: int) -> SequencePartition:
        """Return how the sequence lies over the ranks, given this rank's length."""

    @abc.abstractmethod
    def gather_sequence(self, tensor: Any, *, dim: int) -> Any:
        """Return the whole sequence in global order; the backward is a reduce-scatter."""

    @abc.abstractmethod
    def launch_gather_sequence(self, tensor: Any, *, dim: int) -> Any:
        """Start a gather; return a handle whose ``wait()`` may be called once."""

    @abc.abstractmethod
    def sequence_to_head(self, tensor: Any, *, seq_dim: int, head_dim: int) -> Any:
        """Exchange a sequence shard of all heads for the whole sequence of a shard of heads."""

    @abc.abstractmethod
    def head_to_sequence(self, tensor: Any, *, seq_dim: int, head_dim: int) -> Any:
        """Undo :meth:`sequence_to_head`."""

    @abc.abstractmethod
    def attention(self, query: Any, kv: KeyValue, *, mask: AttentionMask, kernel: Any) -> Any:
        """Return the attention output for the local queries, shaped like ``query`` with the value's head dim.

        ``query`` [B, N, S, D]; ``mask`` without positions, since the protocol knows where tokens lie, its document ids those of
        the local tokens; ``kernel(query, key, value, *, mask) -> (output, log-sum-exp)``: ``attention_with_lse``, scale bound.
        """


@attrs.frozen(kw_only=True)
class DispatchedExperts:
    """Tokens that arrived at their experts.

    ``values`` [R, H] expert-major; ``weights`` [R]; ``local_ids`` [R]; ``counts`` [local experts]; ``receipt`` is single-use
    and belongs to the context that made it.
    """

    values: Any
    weights: Any
    local_ids: Any
    counts: Any
    receipt: Any


class EPContext(abc.ABC):
    """Dispatch of tokens to the ranks that own their experts, and back. Dropless; ownership is contiguous."""

    @abc.abstractmethod
    def dispatch(self, hidden: Any, expert_indices: Any, routing_weights: Any) -> DispatchedExperts:
        """Send hidden [T, H] to the owners of expert_indices [T, K]; routing_weights [T, K] keep their gradient."""

    @abc.abstractmethod
    def combine(self, values: Any, receipt: Any) -> Any:
        """Return [T, H]: the sum, in fp32, of the rows in ``values``, which the body has multiplied by the weights."""


@attrs.frozen(kw_only=True)
class ProtocolChoice:
    """A recipe's choice of a protocol and its options."""

    name: str
    options: Mapping[str, Any] = attrs.field(factory=dict, converter=as_dict)
