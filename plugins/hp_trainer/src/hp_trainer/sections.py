"""The recipe sections of hp-trainer: ``train``, ``data``, ``checkpoint`` and ``run``, as frozen data. Torch-free."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs

from hp_core.contracts import Problem
from hp_core.mesh.topology import Topology
from hp_core.recipe.values import IllegalValueError, at_least


def above_zero(_: Any, attribute: attrs.Attribute[Any], value: float | None) -> None:
    """Attrs validator: the number is more than 0; null passes where the type allows it."""
    if value is not None and value <= 0:
        raise IllegalValueError(attribute.name, value, expected="more than 0")


def _fraction(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not 0 <= value < 1:
        raise IllegalValueError(attribute.name, value, expected="0 or more and less than 1")


def _both_fractions(_: Any, attribute: attrs.Attribute[Any], value: tuple[float, float]) -> None:
    if not all(0 <= one < 1 for one in value):
        raise IllegalValueError(attribute.name, value, expected="two numbers, 0 or more and less than 1")


@attrs.frozen(kw_only=True)
class Optimizer:
    """The optimizer: ``adamw`` or ``sgd`` (plain: no momentum, ``betas`` not used).

    ``lr`` is the peak learning rate. ``weight_decay`` is decoupled for adamw, part of the gradient for sgd, and applies to
    parameters of two or more dims only: norm weights and biases are never decayed.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = attrs.field(default=3e-4, validator=above_zero)
    betas: tuple[float, float] = attrs.field(default=(0.9, 0.95), validator=_both_fractions)
    weight_decay: float = attrs.field(default=0.1, validator=at_least(0))


@attrs.frozen(kw_only=True)
class Scheduler:
    """The learning rate over the steps: ``constant``, ``cosine`` or ``linear``, after a linear warm-up of ``warmup_steps``."""

    name: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: int = attrs.field(default=0, validator=at_least(0))


@attrs.frozen(kw_only=True)
class Evaluation:
    """When the held-out loss is taken: every ``every`` steps (0: never in between) and after the last step.

    ``batches`` is how many global batches of held-out windows are read, from the first on; 0 reads all of them.
    """

    every: int = attrs.field(default=0, validator=at_least(0))
    batches: int = attrs.field(default=0, validator=at_least(0))


@attrs.frozen(kw_only=True)
class Train:
    """The loop. Sizes are in windows (``global_batch_size``, ``micro_batch_size``) and tokens (``sequence_length``).

    One step reads ``global_batch_size`` windows over all ranks; a rank runs its share ``micro_batch_size`` windows at a time.
    ``grad_clip`` is the largest gradient norm; null does not clip.
    """

    pads: ClassVar[bool] = True  # rows are padded to what cp cuts them into

    steps: int = attrs.field(default=100, validator=at_least(1))
    global_batch_size: int = attrs.field(default=8, validator=at_least(1))
    micro_batch_size: int = attrs.field(default=1, validator=at_least(1))
    sequence_length: int = attrs.field(default=512, validator=at_least(1))
    optimizer: Optimizer = attrs.field(factory=Optimizer)
    scheduler: Scheduler = attrs.field(factory=Scheduler)
    grad_clip: float | None = attrs.field(default=1.0, validator=above_zero)
    seed: int = attrs.field(default=0, validator=at_least(0))
    deterministic: bool = False
    eval: Evaluation = attrs.field(factory=Evaluation)

    def __attrs_post_init__(self) -> None:
        if self.global_batch_size % self.micro_batch_size:
            raise IllegalValueError(
                "global_batch_size",
                self.global_batch_size,
                expected=f"a multiple of micro_batch_size ({self.micro_batch_size})",
            )

    def problems(self, topology: Topology) -> list[Problem]:
        """Return HP502 if the global batch does not divide over the ranks that read different windows."""
        share = topology.data * self.micro_batch_size
        if self.global_batch_size % share == 0:
            return []
        return [
            Problem(
                code="HP502",
                what=f"train.global_batch_size ({self.global_batch_size}) must be divisible by dp_replicate * dp_shard *"
                f" train.micro_batch_size ({topology.data} * {self.micro_batch_size})",
                where="train.global_batch_size",
                fix=f"use a multiple of {share}",
            )
        ]


@attrs.frozen(kw_only=True)
class Data:
    """Where the tokens come from and how they are cut.

    ``path`` is a file, a folder or a glob pattern (``text``), or a file of that kind with JSON lines (``jsonl``); relative
    paths start at the recipe's folder. ``tokenizer`` is ``bytes`` (vocabulary 256) or the path of a ``tokenizer.json`` or of a
    folder that holds one.
    ``held_out`` is the fraction of the tokens, at the end, that is never trained on. ``packing`` keeps documents apart: tokens
    of one do not see another, positions start again, and nothing is predicted across.
    """

    source: Literal["text", "jsonl", "python-docs"] = "python-docs"
    path: Path | None = None
    tokenizer: Literal["bytes"] | Path = "bytes"
    shuffle: bool = False
    packing: bool = False
    held_out: float = attrs.field(default=0.05, validator=_fraction)

    def __attrs_post_init__(self) -> None:
        if self.source == "python-docs" and self.path is not None:
            raise IllegalValueError("path", str(self.path), expected="no path with source python-docs")
        if self.source != "python-docs" and self.path is None:
            raise IllegalValueError("path", None, expected=f"a file, a folder or a pattern with source {self.source}")

    def masks(self) -> list[tuple[str, str]]:
        """Return what is asked of attention beyond causality: the mask, and the key that asks for it."""
        return [("packed", "data.packing")] if self.packing else []

    def absent(self) -> list[str]:
        """Return a line for the text and the tokenizer if this machine has none under their paths."""
        found = [] if self.path is None or _names_something(self.path) else [f"data.path '{self.path}'"]
        found += [] if self.tokenizer == "bytes" or _names_something(self.tokenizer) else [f"data.tokenizer '{self.tokenizer}'"]
        return [f"{name} names no file on this machine" for name in found]


def _names_something(path: Path) -> bool:
    try:
        return path.exists() or bool(glob.glob(str(path), recursive=True))
    except (OSError, ValueError):  # a name that no file system can hold
        return False


@attrs.frozen(kw_only=True)
class Checkpoint:
    """What is written: ``export_hf`` writes ``hf/`` in the run directory at the end, in Hugging Face's format."""

    every: int = attrs.field(default=0, validator=at_least(0))
    keep: int = attrs.field(default=0, validator=at_least(0))
    export_hf: bool = False
    resume: bool = False

    def unsupported(self) -> dict[str, str]:
        """Return the keys whose value nothing implements, with the reason."""
        reason = "checkpoints of a run that goes on are not written yet: use export_hf"
        return {name: reason for name in ("every", "keep", "resume") if getattr(self, name)}


@attrs.frozen(kw_only=True)
class Run:
    """The run directory. ``dir`` null: ``runs/<recipe name>-<n>`` with the first free n, below the current folder."""

    dir: str | None = None
    tensorboard: bool = True
