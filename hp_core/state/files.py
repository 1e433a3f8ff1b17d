"""The safetensors files of a checkpoint folder: which tensors they hold, read from their headers, and reading one.

Any damage is a :class:`CheckpointError` HP804 that names the file: nothing else of this package opens a weights file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hp_core.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONVERT = "load it with transformers and write it again with save_pretrained"


@attrs.frozen(kw_only=True)
class FileTensor:
    """One tensor of a file: the file's name, its shape, and its dtype as safetensors spells it (``"BF16"``)."""

    file: str
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class CheckpointFiles:
    """All tensors of a checkpoint folder, by file key."""

    folder: Path
    tensors: Mapping[str, FileTensor]

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Yield a reader that opens each file once and closes all of them at the end."""
        with ExitStack() as stack:
            yield Reader(self, stack)


class Reader:
    """Tensors by file key, mapped: what is not looked at is not read."""

    def __init__(self, files: CheckpointFiles, stack: ExitStack) -> None:
        self._files = files
        self._stack = stack
        self._open: dict[str, Any] = {}

    def read(self, key: str) -> Tensor:
        """Return the tensor stored under ``key``, on the CPU, in the file's dtype. ``KeyError`` if there is none."""
        name = self._files.tensors[key].file
        if name not in self._open:
            self._open[name] = self._stack.enter_context(_opened(self._files.folder / name))
        tensor: Tensor = self._open[name].get_tensor(key)
        return tensor


def open_checkpoint(path: str | Path) -> CheckpointFiles:
    """Return the tensors of the checkpoint in folder ``path``: ``model.safetensors``, or the shards of its index.

    Raises :class:`CheckpointError` HP804 if the folder, the index, a shard or a header is missing or damaged, if the
    weights are not safetensors, or if the folder holds both kinds of checkpoint.
    """
    folder = Path(path)
    if (folder / INDEX).is_file():
        _refuse_both(folder)
        return CheckpointFiles(folder=folder, tensors=_sharded(folder))
    if (folder / SINGLE).is_file():
        return CheckpointFiles(folder=folder, tensors=_header(folder / SINGLE))
    raise _nothing(folder)


def _refuse_both(folder: Path) -> None:
    """Raise HP804 if the folder of an index also holds a checkpoint in one file: readers differ in which one they take."""
    if (folder / SINGLE).is_file() and SINGLE not in _index(folder / INDEX).values():
        what = f"{folder} holds both {SINGLE} and {INDEX}, which are two checkpoints"
        raise CheckpointError("HP804", what, expected="one of them", fix="remove the one that you do not mean")


def _nothing(folder: Path) -> CheckpointError:
    """Return the error for a folder without safetensors files: it says what is there instead."""
    expected = f"a folder with {SINGLE} or {INDEX}"
    if not folder.is_dir():
        return CheckpointError("HP804", f"{folder} is not a folder", expected=expected)
    others = sorted(found.name for found in folder.iterdir() if found.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if others:
        what = f"{folder} holds {others[0]}, which is not a safetensors file"
        return CheckpointError("HP804", what, expected=expected, fix=CONVERT)
    return CheckpointError("HP804", f"{folder} holds no weights", expected=expected)


def _sharded(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors that the index lists; the shards must hold exactly those."""
    listed = _index(folder / INDEX)
    found: dict[str, FileTensor] = {}
    for name in sorted(set(listed.values())):
        if not (folder / name).is_file():
            count = sum(file == name for file in listed.values())
            what = f"{folder} lacks the shard {name}, which by {INDEX} holds {count} of {len(listed)} tensors"
            raise CheckpointError("HP804", what, fix="copy the missing file, or the whole checkpoint again")
        found.update(_header(folder / name))
    for key in sorted(listed.keys() ^ found.keys()):
        what = f"{folder / INDEX} and the shards disagree about {key}"
        raise CheckpointError("HP804", what, expected="the same tensors in both", fix="copy the checkpoint again")
    return found


def _index(path: Path) -> dict[str, str]:
    """Return the index's map from file keys to shard names, all of them plain names in the same folder."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(key): Path(value).name for key, value in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        what = f"{path} is not a readable index ({type(error).__name__}: {error})"
        raise CheckpointError("HP804", what, expected='JSON with a "weight_map" of file keys to shard names') from error
    return names


def _header(path: Path) -> dict[str, FileTensor]:
    with _opened(path) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        return {
            key: FileTensor(file=path.name, shape=tuple(part.get_shape()), dtype=part.get_dtype())
            for key, part in slices.items()
        }


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        what = f"{path} ({path.stat().st_size if path.exists() else 0} bytes) is not a readable safetensors file ({error})"
        raise CheckpointError("HP804", what, fix="copy the file again; it may have been cut short") from error
