"""Writing a checkpoint folder so that it is there completely or not at all.

Everything goes to a hidden folder beside the final one, reaches the disk, and is renamed. A failure (a full disk, a
folder that cannot be made) is kept, the hidden folder is removed, and further work is skipped until the caller asks:
other ranks are still sending their parts and must not be left waiting.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hp_core.errors import CheckpointError
from hp_core.state.files import INDEX, SINGLE
from hp_core.state.manifest import Manifest


@attrs.frozen(kw_only=True)
class Shard:
    """One file to be written: its name, the keys it holds in order, and their size in bytes."""

    name: str
    keys: tuple[str, ...]
    size: int


def plan_shards(manifest: Manifest, *, max_size: int) -> tuple[Shard, ...]:
    """Return the files for a manifest: one, or several of at most ``max_size`` bytes (a larger tensor has its own)."""
    groups: list[list[tuple[str, int]]] = [[]]
    room = max_size
    for key, size in _sizes(manifest):
        if groups[-1] and size > room:
            groups.append([])
            room = max_size
        groups[-1].append((key, size))
        room -= size
    return tuple(
        Shard(name=_name(index, len(groups)), keys=tuple(key for key, _ in group), size=sum(size for _, size in group))
        for index, group in enumerate(groups)
    )


def _name(index: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _sizes(manifest: Manifest) -> Iterable[tuple[str, int]]:
    for entry in manifest.entries:
        width = getattr(torch, entry.dtype).itemsize
        for piece in entry.pieces:
            yield piece.key, width * torch.Size(piece.shape).numel()


class Draft:
    """A checkpoint on its way to ``path``. Use as a context manager: what was not committed is removed at the end.

    ``error`` is the first failure; after it, and on ranks where it is not ``active``, every method does nothing.
    """

    def __init__(self, path: Path, shards: tuple[Shard, ...], *, active: bool) -> None:
        self.error: CheckpointError | None = None
        self._active = active
        self._path = path
        self._folder = path.parent / f".{path.name}.{os.getpid()}.tmp"
        self._waiting = list(shards)
        self._shards = shards
        self._tensors: dict[str, Tensor] = {}
        if active and not _can_exist(path):
            self.error = _unwritable(path, OSError("no file can have this name"))
        self._try(self._begin)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._try(self._discard)

    def add(self, key: str, tensor: Tensor) -> None:
        """Take the next tensor, in the order of the shards; a shard is written as soon as it is complete."""
        self._try(lambda: self._add(key, tensor))

    def commit(self, files: Mapping[str, bytes]) -> None:
        """Write the remaining ``files`` (name to content) and give the folder its final name."""
        self._try(lambda: self._commit(files))

    def _try(self, action: Callable[[], None]) -> None:
        if self.error is not None or not self._active:
            return
        try:
            action()
        except (OSError, SafetensorError) as error:
            self.error = _unwritable(self._path, error)
            self._discard()

    def _discard(self) -> None:
        self._tensors.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self) -> None:
        if self._path.exists() and not (self._path.is_dir() and not any(self._path.iterdir())):
            raise FileExistsError("it exists and is not an empty folder")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()

    def _add(self, key: str, tensor: Tensor) -> None:
        self._tensors[key] = tensor.detach().cpu().contiguous()
        if len(self._tensors) == len(self._waiting[0].keys):
            shard = self._waiting.pop(0)
            save_file({name: self._tensors[name] for name in shard.keys}, self._folder / shard.name, metadata={"format": "pt"})
            self._tensors.clear()
            _sync(self._folder / shard.name)

    def _commit(self, files: Mapping[str, bytes]) -> None:
        assert not self._waiting, f"{self._waiting[0].name} is not complete"
        for name, content in {**files, **self._index()}.items():
            (self._folder / name).write_bytes(content)
            _sync(self._folder / name)
        _sync(self._folder)
        self._folder.rename(self._path)
        _sync(self._path.parent)

    def _index(self) -> dict[str, bytes]:
        if len(self._shards) == 1:
            return {}
        total = sum(shard.size for shard in self._shards)
        where = {key: shard.name for shard in self._shards for key in shard.keys}
        return {INDEX: to_json({"metadata": {"total_size": total}, "weight_map": where})}


def _can_exist(path: Path) -> bool:
    """Whether a file can have this name: one with a NUL or half a surrogate cannot."""
    try:
        return b"\0" not in os.fsencode(path)
    except ValueError:
        return False


def to_json(data: Mapping[str, object]) -> bytes:
    """Return ``data`` as Hugging Face writes its JSON files."""
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()


def _sync(path: Path) -> None:
    """Make a file or folder durable; give a file the permissions of its folder (safetensors writes owner-only files)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if path.is_file():
            os.fchmod(handle, path.parent.stat().st_mode & 0o666)
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(path: Path, error: OSError | SafetensorError) -> CheckpointError:
    reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    full = not isinstance(error, OSError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    found = CheckpointError(
        "HP805",
        f"cannot write the checkpoint {path}: {reason}",
        expected="a new folder on a disk with room for it",
        where="Nothing was left behind.",
        fix="free some space or name another folder" if full else "name another folder",
    )
    found.__cause__ = error
    return found
