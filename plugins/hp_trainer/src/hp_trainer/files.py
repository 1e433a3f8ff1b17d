"""Writing the files of a run directory, and claiming the directory itself. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from hp_core.errors import RunError

DEFAULT_PARENT = "runs"


def claim_directory(directory: str | None, *, recipe: Path) -> Path:
    """Create the run directory and return its absolute path.

    A named ``directory`` must be absent or empty; None takes ``runs/<recipe name>-<n>`` with the first free n from 1.

    Raises:
        RunError: HP705 if the named one holds files, or if it cannot be created.
    """
    where = Path(directory) if directory else Path(DEFAULT_PARENT)
    try:
        return _claim_named(where) if directory else _claim_numbered(where, name=recipe.stem)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL or half a surrogate, which no file can have
        reason = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise RunError(
            "HP705", f"the run directory {str(where)!r} cannot be created: {reason}", fix="choose another with --run-dir"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into the one-line error HP704 about ``path``."""
    try:
        yield
    except OSError as error:
        raise RunError(
            "HP704",
            f"{path} cannot be written: {error.strerror}",
            fix="free space there, or choose another place with --run-dir",
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``; HP704 if that fails, and then no file is left behind."""
    try:
        with writing(path):
            path.write_text(text, encoding="utf-8")
    except RunError:
        if path.is_file() and not path.is_symlink():
            path.unlink()
        raise


def _claim_named(where: Path) -> Path:
    where.mkdir(parents=True, exist_ok=True)
    if any(where.iterdir()):
        raise RunError(
            "HP705", f"the run directory {where} is not empty", expected="a new or an empty one", fix="choose another --run-dir"
        )
    return where.resolve()


def _claim_numbered(parent: Path, *, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        candidate = parent / f"{name}-{number}"
        if not candidate.exists():
            candidate.mkdir()
            return candidate.resolve()
    raise AssertionError("unreachable: count() does not end")
