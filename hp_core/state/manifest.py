"""Manifest: for every parameter and saved buffer of a plan, the file keys it is stored under, with shape and dtype.

Made from a :class:`BuildPlan` alone, before any file is opened, so load and save agree on one list. Torch-free.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import attrs

from hp_core.contracts.checkpoint import CheckpointMapping, KeyRule
from hp_core.contracts.plan import BufferPlan, BuildPlan, ParameterPlan
from hp_core.errors import CheckpointError
from hp_core.state.transforms import Shape, Step, Strand, source_shape, strands

PLACEHOLDER = re.compile(r"\{(\w+)\}")


@attrs.frozen(kw_only=True)
class Piece:
    """One file key and where its tensor lies in Hugging Face's runtime tensor.

    ``expert`` is its index on dim 0 (None: not stacked). It fills the runtime tensor from ``start`` on along ``dim`` (None:
    all of it). ``shape`` is its shape in the file; ``dim`` counts in the runtime tensor, stacked dim included.
    """

    key: str
    shape: Shape
    expert: int | None = None
    dim: int | None = None
    start: int = 0

    @property
    def length(self) -> int:
        """How much of ``dim`` of the runtime tensor it fills; for pieces that have a ``dim``."""
        assert self.dim is not None
        return self.shape[self.dim - (self.expert is not None)]


@attrs.frozen(kw_only=True)
class Entry:
    """One of Hugging Face's runtime tensors, by its canonical FQN, and the parameter or saved buffer that it is (a part) of.

    ``shape`` is the shape of Hugging Face's tensor, ``dtype`` the parameter's; ``steps`` lead from there to the
    component's tensor, which is called ``parameter``. ``names`` holds, for each name of a tied tensor (the canonical one
    first), its pieces: a file needs one of them and may have several, which must then be equal; saving writes the first.
    """

    fqn: str
    parameter: str
    shape: Shape
    dtype: str
    names: tuple[tuple[Piece, ...], ...]
    steps: tuple[Step, ...] = ()
    buffer: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that saving writes."""
        return self.names[0]


@attrs.frozen(kw_only=True)
class Manifest:
    """All entries in the order of the plan, those of one parameter together.

    ``ignored``: patterns of file keys that the model leaves out on purpose.
    """

    entries: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()

    def ignores(self, key: str) -> bool:
        """Return whether a file key is left out on purpose."""
        return any(_regex(pattern).fullmatch(key) for pattern in self.ignored)


def make_manifest(plan: BuildPlan) -> Manifest:
    """Return the manifest of ``plan`` under its mapping.

    Raises :class:`CheckpointError` HP806 if a tensor has no key, a rule does not fit its tensor, or a key has two tensors.
    """
    saved = [buffer for buffer in plan.buffers if buffer.persistent]
    entries = [entry for parameter in plan.parameters for entry in _parameter(parameter, plan.mapping)]
    entries += [_buffer(buffer, plan.mapping) for buffer in saved]
    _unique(entries)
    return Manifest(entries=tuple(entries), ignored=plan.mapping.ignored)


def _parameter(parameter: ParameterPlan, mapping: CheckpointMapping) -> Iterator[Entry]:
    for strand in strands(parameter.transforms, parameter.shape):
        shape = source_shape(strand.steps, parameter.shape)
        fqns = source_names(parameter, strand)
        yield Entry(
            fqn=fqns[0],
            parameter=parameter.fqn,
            shape=shape,
            dtype=parameter.dtype,
            names=tuple(_pieces(fqn, shape, mapping.rules) for fqn in fqns),
            steps=strand.steps,
        )


def source_names(parameter: ParameterPlan, strand: Strand) -> tuple[str, ...]:
    """Return Hugging Face's names for a strand of ``parameter``, the canonical one first.

    HP806: the parameter joins several tensors and is tied to one of another path, which does not.
    """
    names = (parameter.fqn, *parameter.aliases)
    if strand.source is None:
        return names
    path = parameter.fqn[len(parameter.owner) + 1 :] if parameter.owner else parameter.fqn
    for name in names:
        if name != path and not name.endswith(f".{path}"):
            what = f"{parameter.fqn}, which joins several tensors, is tied to {name}"
            raise CheckpointError("HP806", what, expected="a tie to the same parameter of another component")
    return tuple(name[: len(name) - len(path)] + strand.source for name in names)


def _buffer(buffer: BufferPlan, mapping: CheckpointMapping) -> Entry:
    names = (_pieces(buffer.fqn, buffer.shape, mapping.rules),)
    return Entry(fqn=buffer.fqn, parameter=buffer.fqn, shape=buffer.shape, dtype=buffer.dtype, names=names, buffer=True)


def _pieces(fqn: str, shape: Shape, rules: Iterable[KeyRule]) -> tuple[Piece, ...]:
    """Return the pieces of one runtime tensor: those of the first rule that matches, else one key of the same name."""
    for rule in rules:
        if found := _regex(rule.runtime).fullmatch(fqn):
            return _apply(rule, fqn, shape, found.groupdict())
    return (Piece(key=fqn, shape=shape),)


def _apply(rule: KeyRule, fqn: str, shape: Shape, names: Mapping[str, str]) -> tuple[Piece, ...]:
    _fits(rule, fqn, shape, names)
    part = shape if rule.concat_dim is None else _shortened(shape, rule.concat_dim, parts=len(rule.files))
    experts: list[int | None] = [None] if rule.experts is None else list(range(rule.experts))
    return tuple(
        Piece(
            key=_fill(pattern, {**names, "e": str(expert)}),
            shape=part if expert is None else part[1:],
            expert=expert,
            dim=rule.concat_dim,
            start=0 if rule.concat_dim is None else index * part[rule.concat_dim],
        )
        for expert in experts
        for index, pattern in enumerate(rule.files)
    )


def _fits(rule: KeyRule, fqn: str, shape: Shape, names: Mapping[str, str]) -> None:
    """Raise HP806 unless the rule can describe a tensor of this shape."""
    known = {*names, *(("e",) if rule.experts is not None else ())}
    dim, count = rule.concat_dim, len(rule.files)
    if not rule.files:
        problem = "names no file keys"
    elif any(set(PLACEHOLDER.findall(pattern)) != known for pattern in rule.files):
        problem = f"has file keys whose placeholders are not {', '.join(sorted(known)) or 'none'}"
    elif (count > 1) != (dim is not None):
        problem = f"has {count} file keys and concat_dim {dim}"
    elif rule.experts is not None and (not shape or shape[0] != rule.experts or dim == 0):
        problem = f"stacks {rule.experts} experts on dim 0 and joins on dim {dim}, but the tensor is {list(shape)}"
    elif dim is not None and (dim >= len(shape) or shape[dim] % count):
        problem = f"joins {count} equal parts on dim {dim}, but the tensor is {list(shape)}"
    else:
        return
    raise CheckpointError("HP806", f"the checkpoint rule for {fqn} ({rule.runtime!r}) {problem}", fix="correct the adapter")


def _unique(entries: Iterable[Entry]) -> None:
    counts = Counter(piece.key for entry in entries for pieces in entry.names for piece in pieces)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        what = f"the checkpoint rules store several tensors under one file key: {some(twice)}"
        raise CheckpointError("HP806", what, expected="one tensor for a key", fix="correct the adapter's checkpoint rules")


def some(keys: Iterable[str]) -> str:
    """Return up to three keys, and how many more there are."""
    listed = list(keys)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more


@functools.lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    """Return the pattern as a regular expression: ``{name}`` is any text, the same wherever the name occurs again."""
    text, seen = "", set[str]()
    for index, part in enumerate(PLACEHOLDER.split(pattern)):
        if index % 2 == 0:
            text += re.escape(part)
        else:
            text += f"(?P={part})" if part in seen else f"(?P<{part}>.+?)"
            seen.add(part)
    return re.compile(text)


def _fill(pattern: str, names: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda found: names[found[1]], pattern)


def _shortened(shape: Shape, dim: int, *, parts: int) -> Shape:
    return (*shape[:dim], shape[dim] // parts, *shape[dim + 1 :])
