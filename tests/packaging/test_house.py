"""The house rules: short files and functions, documented names, a core that knows no model and no machine."""

from __future__ import annotations

import ast
import os
import re
import statistics
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "hp_core",
    *(f"{path.parent.relative_to(ROOT).as_posix()}/src" for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))),
    *(f"{path.parent.relative_to(ROOT).as_posix()}/src" for path in sorted(ROOT.glob("hp_*/pyproject.toml"))),
)
WRITTEN = ("*.py", "*.md", "*.toml", "*.yaml", "*.yml", "*.ini", "*.txt", "*.json")
HIDDEN = re.compile(r"^(\..*|build|dist|.*\.egg-info|__pycache__)$")

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODEL_NAMES = re.compile(r"qwen|deepseek|llama|mixtral|mistral|gemma|olmo|phi3|gpt_oss|kimi|glm4", re.IGNORECASE)
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:work|home(?!/me\b)|root|Users|tmp/venv)/\w")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def in_repository(*patterns: str) -> Iterator[Path]:
    """Yield the repository's own files of some patterns: no build output, no environments, nothing hidden but CI."""
    for folder, below, files in os.walk(ROOT):
        below[:] = [name for name in below if name == ".ci" or not HIDDEN.match(name)]
        yield from (Path(folder) / name for name in files if any(fnmatch(name, pattern) for pattern in patterns))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def length(function: Function) -> int:
    """Lines from ``def`` to the last one; decorators are not counted."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def undocumented(path: Path) -> Iterator[str]:
    """Yield the public names of a module that have no docstring; the module itself is ``<module>``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if tree.body and not ast.get_docstring(tree):
        yield "<module>"
    yield from _undocumented(tree, "")


def _undocumented(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in scope.body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and not _is_overload(node):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node, f"{prefix}{node.name}.")


def _is_overload(node: ast.ClassDef | Function) -> bool:
    return any("overload" in ast.dump(decorator) for decorator in node.decorator_list)


def test_the_rules_look_at_real_files():
    assert len(SOURCES) > 80
    assert name_of(ROOT / "hp_core" / "errors.py") in {name_of(path) for path in SOURCES}
    assert any(functions(ROOT / "hp_core" / "errors.py"))


def test_files_are_under_400_lines():
    long = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in in_repository("*.py")}
    assert {name: lines for name, lines in long.items() if lines >= 400} == {}


def test_functions_are_under_60_lines():
    long = [f"{name_of(path)}:{f.name} {length(f)}" for path in SOURCES for f in functions(path) if length(f) >= 60]
    assert long == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_median_function_is_under_12_lines(package):
    lengths = [length(function) for path in (ROOT / package).rglob("*.py") for function in functions(path)]
    assert statistics.median(lengths) < 12


def test_every_module_and_public_name_has_a_docstring():
    assert [f"{name_of(path)}: {name}" for path in SOURCES for name in undocumented(path)] == []


def test_the_core_names_no_model():
    found = [
        f"{name_of(path)}:{number}"
        for path in (ROOT / "hp_core").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MODEL_NAMES.search(line)
    ]
    assert found == []


def test_no_file_names_a_folder_of_somebody_s_machine():
    found = [
        f"{name_of(path)}:{number}"
        for path in in_repository(*WRITTEN)
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert found == []


def test_nothing_is_left_for_later():
    marks = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    found = [
        f"{name_of(path)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []


def test_every_package_is_typed():
    missing = [package for package in PACKAGES if not list((ROOT / package).glob("**/py.typed"))]
    assert missing == []
