"""The recipe: frozen classes of every section that the core owns. Plugins own the others (``hp_sections``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from hp_core.contracts import ModelAdapter
from hp_core.errors import PlanError
from hp_core.mesh.sequence import sequence_parts
from hp_core.mesh.topology import MEANT, SHORT_FORMS, Topology
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.overrides import Override
from hp_core.recipe.tree import Node
from hp_core.recipe.unstructure import plain, to_yaml
from hp_core.recipe.values import IllegalValueError, at_least, degree, degree_or_fill, dtype_name, filled

Dtype = Literal["float32", "bfloat16", "float16", "float64", "fp32", "bf16", "fp16", "fp64"]


@attrs.frozen(kw_only=True)
class Model:
    """Which model, from where, and in which dtype its parameters are held.

    - ``adapter``: name of an installed adapter, a Hugging Face model type, or an architecture.
    - ``checkpoint``: local folder with a Hugging Face checkpoint; weights and configuration come from it.
    - ``config``: Hugging Face configuration: a mapping, or the path of a ``config.json``; weights are initialised.
    - ``dtype``: dtype in which parameters are held.

    The recipe gives exactly one of ``checkpoint`` and ``config``. Once loaded, ``config`` is a plain dict in both cases and
    ``checkpoint`` an absolute path.
    """

    adapter: str = attrs.field(validator=filled)
    checkpoint: str | None = None
    config: Mapping[str, Any] | None = attrs.field(default=None, metadata={"kind": str | Mapping[str, Any] | None})
    dtype: str = attrs.field(default="float32", converter=dtype_name, metadata={"kind": Dtype})


@attrs.frozen(kw_only=True)
class Mesh:
    """Degrees of the mesh axes: ``pp * dp_replicate * dp_shard * cp * tp`` is the number of processes.

    - ``tp``: tensor parallel degree.
    - ``cp``: context parallel degree.
    - ``ep``: expert parallel degree; divides ``dp_shard * cp * tp``.
    - ``pp``: pipeline parallel degree.
    - ``dp_shard``: data parallel degree over which FSDP cuts parameters; -1 takes what the others leave.
    - ``dp_replicate``: data parallel degree over which parameters are copied.
    - ``sequence_parallel``: between tensor-parallel blocks, cut activations along the sequence.
    - ``loss_parallel``: compute the loss from logits that stay cut along the vocabulary.
    - ``shared_memory``: on CPUs, ranks of one host exchange through memory that they share, others through sockets.
    """

    meant: ClassVar[Mapping[str, str]] = {**MEANT, **{short: f"write {axis}" for short, axis in SHORT_FORMS.items()}}

    tp: int = attrs.field(default=1, validator=degree)
    cp: int = attrs.field(default=1, validator=degree)
    ep: int = attrs.field(default=1, validator=degree)
    pp: int = attrs.field(default=1, validator=degree)
    dp_shard: int = attrs.field(default=-1, validator=degree_or_fill)
    dp_replicate: int = attrs.field(default=1, validator=degree)
    sequence_parallel: bool = True
    loss_parallel: bool = True
    shared_memory: bool = True


@attrs.frozen(kw_only=True)
class Precision:
    """Dtypes of computation and of gradient reduction.

    - ``compute``: dtype of the forward and backward; null is ``model.dtype``.
    - ``reduce``: dtype in which FSDP reduces gradients.
    - ``scheme``: registered precision scheme for the whole model.
    - ``cpu_matmul``: ``auto`` multiplies otherwise on CPUs where a probe finds that exact and faster.
    """

    compute: str | None = attrs.field(default=None, converter=dtype_name, metadata={"kind": Dtype | None})
    reduce: str = attrs.field(default="float32", converter=dtype_name, metadata={"kind": Dtype})
    scheme: str | None = None
    cpu_matmul: Literal["auto", "off"] = "auto"


@attrs.frozen(kw_only=True)
class Fsdp:
    """How FSDP treats parameters.

    - ``reshard_after_forward``: free gathered parameters after the forward and gather them again for the backward.
    - ``offload``: keep parameters, gradients and optimizer state in host memory.
    """

    reshard_after_forward: bool = True
    offload: bool = False


@attrs.frozen(kw_only=True)
class Recompute:
    """What is computed again in the backward instead of being stored.

    - ``mode``: nothing, whole layers, or all of a layer but its matrix products.
    - ``layers``: layer indices and fnmatch patterns of layer names; null is every layer.
    """

    mode: Literal["off", "full", "selective"] = "off"
    layers: tuple[int | str, ...] | None = None

    def __attrs_post_init__(self) -> None:
        if self.layers is None:
            return
        if self.mode == "off":
            raise IllegalValueError("layers", self.layers, expected="null while mode is off", fix="set recompute.mode")
        if not self.layers or any(layer == "" or (isinstance(layer, int) and layer < 0) for layer in self.layers):
            raise IllegalValueError("layers", self.layers, expected="layer indices from 0 and patterns, at least one")


@attrs.frozen(kw_only=True)
class ContextProtocol:
    """The protocol of attention over cp; in place of the mapping, its name alone will do.

    - ``name``: registered protocol.
    - ``inner``: degree of the inner sub-axis of a protocol that has two.
    - ``outer``: what a protocol with two sub-axes does on the outer one.
    - ``sequence_layout``: order of the tokens over ranks; null is the protocol's own.
    """

    name: str = attrs.field(default="allgather", validator=filled)
    inner: int | None = None
    outer: Literal["ring", "allgather"] | None = None
    sequence_layout: Literal["contiguous", "zigzag"] | None = None


@attrs.frozen(kw_only=True)
class ExpertProtocol:
    """The protocol that carries tokens to experts over ep; in place of the mapping, its name alone will do.

    - ``name``: registered protocol.
    """

    name: str = attrs.field(default="dedup", validator=filled)


def _context(value: str | ContextProtocol) -> ContextProtocol:
    return ContextProtocol(name=value) if isinstance(value, str) else value


def _expert(value: str | ExpertProtocol) -> ExpertProtocol:
    return ExpertProtocol(name=value) if isinstance(value, str) else value


@attrs.frozen(kw_only=True)
class Protocols:
    """How modules communicate over the axes whose protocols are plugins.

    - ``cp``: protocol of attention over cp.
    - ``ep``: protocol of experts over ep.
    """

    cp: ContextProtocol = attrs.field(factory=ContextProtocol, converter=_context, metadata={"kind": str | ContextProtocol})
    ep: ExpertProtocol = attrs.field(factory=ExpertProtocol, converter=_expert, metadata={"kind": str | ExpertProtocol})


@attrs.frozen(kw_only=True)
class Aux:
    """The load-balancing loss of the routers.

    - ``kind``: Hugging Face's formula over all layers and tokens of a micro-batch, or per layer and row of it.
    - ``coefficient``: its weight in the loss.
    """

    kind: Literal["hf", "sequence"] = "hf"
    coefficient: float = attrs.field(default=0.0, validator=at_least(0))


@attrs.frozen(kw_only=True)
class Loss:
    """The loss and what is added to it.

    - ``chunk``: tokens whose logits exist at the same time.
    - ``aux``: load-balancing loss of the routers.
    - ``router_z``: weight of the squared log-sum-exp of router logits.
    - ``bias_update_rate``: how far one step moves the routers' correction bias towards balanced experts.
    """

    chunk: int = attrs.field(default=1024, validator=at_least(1))
    aux: Aux = attrs.field(factory=Aux)
    router_z: float = attrs.field(default=0.0, validator=at_least(0))
    bias_update_rate: float = attrs.field(default=0.0, validator=at_least(0))


@attrs.frozen(kw_only=True)
class PluginSwitches:
    """Which plugins the run may use.

    - ``disabled``: names of installed plugins that are treated as blocked.
    """

    disabled: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Recipe:
    """A checked recipe: a frozen value that says everything about a run but the number of processes.

    - ``model``: which model, from where, in which dtype.
    - ``mesh``: degrees of the mesh axes.
    - ``precision``: dtypes of computation and reduction.
    - ``fsdp``: how FSDP treats parameters.
    - ``recompute``: what the backward computes again.
    - ``device``: kind of device that the run uses.
    - ``compile``: what is compiled: nothing, element-wise pieces, or the model.
    - ``protocols``: how modules communicate over cp and ep.
    - ``kernels``: ``auto`` takes the device's; or operator -> kernel name, or -> module pattern -> kernel name, first match.
    - ``overrides``: replaced modules, changed layouts, frozen parts; in order.
    - ``freeze``: fnmatch patterns of parameters that are not trained.
    - ``loss``: the loss and what is added to it.
    - ``plugins``: which plugins the run may use.

    ``sections`` holds the objects of the sections that plugins own, those that the recipe names; ``declarations`` are the
    plugins it was checked against, without the disabled ones; ``trusted`` the packages that the command line trusts. Two
    recipes are equal if all their values are.

    Example::

        recipe = load_recipe("tiny.yaml", plugins=load_plugins(), sets=["mesh.tp=2"])
        recipe.topology(world=4).dp_shard  # 2
    """

    model: Model
    mesh: Mesh = attrs.field(factory=Mesh)
    precision: Precision = attrs.field(factory=Precision)
    fsdp: Fsdp = attrs.field(factory=Fsdp)
    recompute: Recompute = attrs.field(factory=Recompute)
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    compile: Literal["off", "pieces", "model"] = "off"
    protocols: Protocols = attrs.field(factory=Protocols)
    kernels: Literal["auto"] | Mapping[str, str | Mapping[str, str]] = "auto"
    overrides: tuple[Override, ...] = ()
    freeze: tuple[str, ...] = ()
    loss: Loss = attrs.field(factory=Loss)
    plugins: PluginSwitches = attrs.field(factory=PluginSwitches)
    sections: Mapping[str, Any] = attrs.field(factory=dict, metadata={"kind": Any})
    trusted: tuple[str, ...] = attrs.field(default=(), metadata={"kind": Any})
    declarations: Plugins = attrs.field(eq=False, repr=False, metadata={"kind": Any})
    origin: Node | None = attrs.field(default=None, eq=False, repr=False, metadata={"kind": Any})

    @property
    def adapter(self) -> ModelAdapter:
        """The adapter of the model; HP101 if no usable plugin provides it."""
        return self.declarations.adapter(self.model.adapter, where=self.where("model.adapter"))

    @property
    def compute(self) -> str:
        """Name of the dtype of forward and backward: the scheme's, ``precision.compute``, or ``model.dtype``."""
        if self.precision.scheme is not None:
            return self.declarations.scheme(self.precision.scheme, where=self.where("precision.scheme")).compute
        return self.precision.compute or self.model.dtype

    @property
    def cpu_matmul(self) -> str:
        """``precision.cpu_matmul``; ``off`` on other devices, in fp64, and where steps must repeat bit for bit."""
        train = self.sections.get("train")
        repeats = train is not None and bool(train.deterministic)
        return "off" if self.device != "cpu" or self.compute == "float64" or repeats else self.precision.cpu_matmul

    @property
    def frozen(self) -> tuple[str, ...]:
        """All fnmatch patterns of parameters that are not trained: of ``freeze`` and of the overrides."""
        below = (f"{match}.{name}" for override in self.overrides for match in override.match for name in override.freeze)
        return (*self.freeze, *below)

    @property
    def seed(self) -> int:
        """``train.seed``, or 0 if there is no such section."""
        train = self.sections.get("train")
        return 0 if train is None else int(train.seed)

    @property
    def tokens(self) -> tuple[int, int]:
        """``(train.micro_batch_size, train.sequence_length)``, or (1, 4096) if there is no such section.

        With cp, a section that pads its rows (``pads``) has them as long as cp and tp can cut.
        """
        train = self.sections.get("train")
        if train is None:
            return 1, 4096
        length = int(train.sequence_length)
        if self.mesh.cp > 1 and getattr(train, "pads", False):
            length = -(-length // self._pieces) * self._pieces
        return train.micro_batch_size, length

    @property
    def _pieces(self) -> int:
        """What a sequence's length must be divisible by for cp and, under sequence parallelism, tp to cut it."""
        choice, mesh = self.protocols.cp, self.mesh
        provided = self.declarations.protocols.get(f"cp:{choice.name}")
        layout = choice.sequence_layout or (provided.declaration.sequence_layout if provided else None)
        inner = choice.inner if choice.inner and mesh.cp % choice.inner == 0 else 1  # another one is refused later
        parts = sequence_parts(cp=mesh.cp, layout=layout, inner=inner)
        return math.lcm(parts, mesh.cp * (mesh.tp if mesh.sequence_parallel else 1))

    @property
    def has_tokens(self) -> bool:
        """Whether the recipe says how many tokens a micro-batch has: whether it has a ``train`` section."""
        return "train" in self.sections

    def where(self, path: str) -> str:
        """Return where a dotted path was written, as ``"recipe.yaml:3"``; for a default, where the section above it was."""
        return f"recipe: {path}" if self.origin is None else self.origin.find(path).where

    def topology(self, world: int | None = None) -> Topology:
        """Return the topology on ``world`` processes; without ``world``, on as few as the mesh allows.

        HP501 if the degrees do not multiply to ``world``, HP502 if ``ep`` does not divide, with the recipe's line.
        """
        degrees = attrs.asdict(self.mesh)
        try:
            return Topology.for_world(world, **degrees)
        except PlanError as error:
            path = "mesh.ep" if error.code == "HP502" else "mesh"
            where = f"{self.where(path)}, {error.where}" if error.where else self.where(path)
            raise PlanError(error.code, error.what, expected=error.expected, where=where, fix=error.fix) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved recipe as plain data, defaults written out; it loads again to an equal recipe."""
        core = {name: plain(getattr(self, name)) for name in CORE_SECTIONS}
        core["model"].pop("checkpoint" if self.model.checkpoint is None else "config")
        return core | {name: plain(section) for name, section in self.sections.items()}

    def to_yaml(self) -> str:
        """Return :meth:`to_dict` as YAML."""
        return to_yaml(self.to_dict())


CORE_SECTIONS = tuple(
    name for name in attrs.fields_dict(Recipe) if name not in ("sections", "trusted", "declarations", "origin")
)
