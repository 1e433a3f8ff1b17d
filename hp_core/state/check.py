"""Does a checkpoint fit a plan? Every difference is found, and named, before a single weight is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import torch

from hp_core.errors import CheckpointError
from hp_core.state.files import CheckpointFiles
from hp_core.state.manifest import Entry, Manifest, Piece, some

# safetensors' spelling -> ours, for the floating dtypes that weights are kept in.
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
OTHERS = {"BOOL": "bool", "I16": "int16", "I32": "int32", "I64": "int64", "I8": "int8", "U8": "uint8"}
# dtype -> the dtypes that hold each of its values exactly
EXACT = {
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}


@attrs.frozen(kw_only=True)
class Source:
    """One entry and the pieces that this checkpoint stores it in."""

    entry: Entry
    pieces: tuple[Piece, ...]


@attrs.frozen(kw_only=True)
class Agreement:
    """How a checkpoint fills a manifest.

    ``ignored`` are the file keys left out on purpose; ``notes`` tell a reader which tensors lose precision on the way in.
    """

    sources: tuple[Source, ...]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def check(manifest: Manifest, files: CheckpointFiles) -> Agreement:
    """Return where each entry is read from.

    Raises :class:`CheckpointError` HP801 (missing keys), HP802 (unexpected keys) or HP803 (shapes, dtypes); the first that
    applies gives the code and the text names the others too. HP807: a tied tensor is stored twice with different values.
    """
    sources = tuple(Source(entry=entry, pieces=_stored(entry, files)) for entry in manifest.entries)
    expected = {piece.key for entry in manifest.entries for pieces in entry.names for piece in pieces}
    ignored = tuple(key for key in files.tensors if key not in expected and manifest.ignores(key))
    missing = [piece.key for source in sources for piece in source.pieces if piece.key not in files.tensors]
    unexpected = sorted(files.tensors.keys() - expected - set(ignored))
    _refuse(files, missing, unexpected, [line for source in sources for line in _misfits(source, files)])
    _compare_ties(manifest.entries, files)
    return Agreement(sources=sources, ignored=ignored, notes=tuple(_notes(sources, files)))


def _stored(entry: Entry, files: CheckpointFiles) -> tuple[Piece, ...]:
    """Return the pieces of the first name that the checkpoint knows at all; of the canonical one if it knows none."""
    known = (pieces for pieces in entry.names if any(piece.key in files.tensors for piece in pieces))
    return next(known, entry.pieces)


def _misfits(source: Source, files: CheckpointFiles) -> Iterator[str]:
    """Yield one line for each stored piece whose shape or dtype cannot be this entry's."""
    for piece in source.pieces:
        found = files.tensors.get(piece.key)
        if found is None:
            continue
        if found.shape != piece.shape:
            yield f"{piece.key} is {list(found.shape)} and not {list(piece.shape)}"
        elif not _loadable(found.dtype, source.entry.dtype):
            yield f"{piece.key} is {found.dtype} and cannot become {source.entry.dtype}"


def _loadable(stored: str, wanted: str) -> bool:
    return stored in FLOATS if wanted in EXACT else OTHERS.get(stored) == wanted


def _refuse(files: CheckpointFiles, missing: list[str], unexpected: list[str], misfits: list[str]) -> None:
    """Raise one error that tells all problems; its code is that of the first kind there is."""
    found = [
        ("HP801", missing, f"lacks {_count(missing)}: {some(missing)}"),
        ("HP802", unexpected, f"has {_count(unexpected, 'unexpected ')}: {some(unexpected)}"),
        ("HP803", misfits, f"has {_count(misfits, 'misfitting ')}: {some(misfits)}"),
    ]
    present = [(code, text) for code, keys, text in found if keys]
    if present:
        what = f"checkpoint {files.folder} " + "; it ".join(text for _, text in present)
        fix = "use the configuration that the checkpoint was made with, or another checkpoint"
        raise CheckpointError(present[0][0], what, expected="exactly the model's tensors", fix=fix)


def _count(keys: list[str], kind: str = "") -> str:
    return f"{len(keys)} {kind}tensor{'s' if len(keys) != 1 else ''}"


def _compare_ties(entries: Iterable[Entry], files: CheckpointFiles) -> None:
    """Raise HP807 if a tensor with several names is stored under more than one of them and they differ."""
    with files.reader() as reader:
        for first, other in _stored_twice(entries, files):
            if not torch.equal(reader.read(first), reader.read(other)):
                what = f"checkpoint {files.folder} has different values for {first} and {other}"
                fix = "set tie_word_embeddings: false in the configuration"
                raise CheckpointError("HP807", what, expected="equal values, since the model ties them", fix=fix)


def _stored_twice(entries: Iterable[Entry], files: CheckpointFiles) -> Iterator[tuple[str, str]]:
    """Yield pairs of file keys that hold the same piece of a tensor under two of its names."""
    for entry in entries:
        stored = [pieces for pieces in entry.names if all(piece.key in files.tensors for piece in pieces)]
        for further in stored[1:]:
            yield from ((one.key, two.key) for one, two in zip(stored[0], further, strict=True))


def _notes(sources: Iterable[Source], files: CheckpointFiles) -> Iterator[str]:
    """Yield one line for each pair of dtypes between which values are rounded."""
    rounded: dict[tuple[str, str], list[str]] = {}
    for source in sources:
        for piece in source.pieces:
            stored = FLOATS.get(files.tensors[piece.key].dtype)
            if stored and source.entry.dtype not in EXACT[stored]:
                rounded.setdefault((stored, source.entry.dtype), []).append(piece.key)
    for (stored, wanted), keys in rounded.items():
        yield f"{_count(keys)} rounded from {stored} to {wanted}: {some(keys)}"
