"""The import guard: while declarations load, torch and what is built on it must not be imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

from hp_core.errors import ImportStageError
from hp_core.plugins.places import short

FORBIDDEN = frozenset(("torch", "torch_npu", "transformers"))


class Guard:
    """A finder that refuses forbidden modules and remembers the first attempt, also if the plugin swallows the error.

    Not a ``MetaPathFinder``: importing ``importlib.abc`` takes longer than everything the guard does.
    """

    def __init__(self, plugin: str, *, package: str) -> None:
        self.plugin = plugin
        self.package = package
        self.violation: ImportStageError | None = None

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return None for a legal import; HP302 otherwise."""
        package = fullname.partition(".")[0]
        if package not in FORBIDDEN:
            return None
        self.violation = self.violation or _error(self.plugin, package, _importer(self.package))
        raise self.violation

    def check(self, modules: Sequence[ModuleType]) -> None:
        """Raise HP302 if an import was refused, or if a module holds something of a forbidden package.

        The second happens only in a process that has torch already, where importing it again asks no finder.
        """
        if self.violation is not None:
            raise self.violation
        for module in modules:
            package = _held(module)
            if package is not None:
                raise _error(self.plugin, package, _import_statement(module, package))


@contextmanager
def guarded(plugin: str, *, package: str) -> Iterator[Guard]:
    """Keep a :class:`Guard` in front of all finders while the block runs; ``package`` is the plugin's top package."""
    guard = Guard(plugin, package=package)
    finders = sys.meta_path
    before = list(finders)
    finders.insert(0, guard)
    try:
        yield guard
    finally:  # others' imports go on as before; a finder that the plugin has added is asked last
        now = list(sys.meta_path) if isinstance(sys.meta_path, list) else []
        added = [finder for finder in now if not any(finder is known for known in (guard, *before))]
        sys.meta_path = finders
        finders[:] = before + added


def _error(plugin: str, package: str, place: str) -> ImportStageError:
    text = f"plugin {plugin!r} imports {package} while it is being listed ({place})"
    return ImportStageError("HP302", text, fix="move it behind the lazy reference")


def _importer(package: str) -> str:
    """Return the place of the import: the innermost one in the plugin's own package, else the innermost of all."""
    places = list(_places())
    own = [place for module, place in places if module.partition(".")[0] == package]
    return (own or [place for _, place in places] or ["unknown place"])[0]


def _places() -> Iterator[tuple[str, str]]:
    """Yield module and ``file:line`` of the frames that led to the guard, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        if "importlib" not in filename and filename != __file__:
            yield module, f"{short(filename, module)}:{frame.f_lineno}"
        frame = frame.f_back


def _held(module: ModuleType) -> str | None:
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        package = name.partition(".")[0] if isinstance(name, str) else ""
        if package in FORBIDDEN:
            return package
    return None


def _import_statement(module: ModuleType, package: str) -> str:
    filename = getattr(module, "__file__", None) or "unknown place"
    try:
        with open(filename, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return filename
    lines = [line for node in ast.walk(tree) for name, line in _imported(node) if name == package]
    return f"{short(filename, module.__name__)}:{min(lines)}" if lines else short(filename, module.__name__)


def _imported(node: ast.AST) -> list[tuple[str, int]]:
    """Return the top packages that an import statement names, with its line."""
    if isinstance(node, ast.Import):
        return [(alias.name.partition(".")[0], node.lineno) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [((node.module or "").partition(".")[0], node.lineno)]
    return []
