"""Lazy references: their form, whether they point to something, and what they load."""

import sys
from collections import OrderedDict

import pytest

from hp_core.errors import DeclarationError
from hp_core.plugins import lazy
from hp_core.testing.plugins import FakeSite


def failing(what: str) -> None:
    """Stand for a declared function with a fault."""
    raise KeyError(what)


def test_a_declared_function_that_fails_is_one_line_with_its_place() -> None:
    with pytest.raises(DeclarationError) as caught:
        lazy.call(f"{__name__}:failing", "size", gives=object)
    assert caught.value.line == (
        f"hp: error[HP402]: '{__name__}:failing' raises KeyError: 'size'. "
        f"tests/hp_core/plugins/test_lazy.py:{failing.__code__.co_firstlineno + 2}. "
        "fix: repair the plugin; --debug shows the traceback"
    )


def test_what_a_declared_function_refuses_is_its_own_error() -> None:
    with pytest.raises(DeclarationError) as caught:
        lazy.call("hp_core.plugins.lazy:load", "not one", gives=object)
    assert caught.value.code == "HP403"


@pytest.mark.parametrize("reference", ["a:b", "a.b.c:D", "a_1.b:C.d"])
def test_a_reference_is_a_module_and_an_attribute(reference: str) -> None:
    assert lazy.is_wellformed(reference)


@pytest.mark.parametrize(
    "reference", ["a", "a.b", "a:", ":b", "a:b:c", "a-b:c", "a..b:c", "a:b()", " a:b", "1a:b", "a:b\n", "", None, 3]
)
def test_anything_else_is_no_reference(reference: object) -> None:
    assert not lazy.is_wellformed(reference)


def test_load_returns_what_the_reference_names() -> None:
    assert lazy.load("collections:OrderedDict") is OrderedDict
    assert lazy.load("collections:OrderedDict.fromkeys")("ab") == OrderedDict(a=None, b=None)


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        (
            "collections.OrderedDict",
            "hp: error[HP403]: 'collections.OrderedDict' is not a lazy reference; expected 'package.module:Attribute'",
        ),
        (
            "collections:OrderdDict",
            "hp: error[HP403]: 'collections:OrderdDict' points to nothing: collections has no 'OrderdDict'; "
            "did you mean 'OrderedDict'?",
        ),
        (
            "nobody_has_this:Thing",
            "hp: error[HP403]: 'nobody_has_this:Thing' fails to import: ModuleNotFoundError: No module named 'nobody_has_this'",
        ),
    ],
)
def test_a_reference_that_cannot_be_loaded_says_why(reference: str, line: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        lazy.load(reference)
    assert caught.value.line == line


def test_the_cause_of_a_failed_import_is_kept(fake_dist: FakeSite) -> None:
    fake_dist.add("acme", files={"acme_code.py": "1 / 0\n"})
    with pytest.raises(DeclarationError) as caught:
        lazy.load("acme_code:Thing")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("reference", "exists"),
    [
        ("collections:OrderedDict", True),
        ("collections.abc:Mapping", True),
        ("nobody_has_this:x", False),
        ("collections.nobody:x", False),
        ("acme_pkg.inner.code:x", True),
        ("acme_pkg.inner.missing:x", False),
        ("acme_pkg.inner.code.deeper:x", False),
        ("acme_pkg", True),
    ],
)
def test_a_module_is_found_without_importing_it(fake_dist: FakeSite, reference: str, exists: bool) -> None:
    raising = "raise RuntimeError('imported')\n"
    names = ("acme_pkg/__init__.py", "acme_pkg/inner/__init__.py", "acme_pkg/inner/code.py")
    fake_dist.add("acme", files=dict.fromkeys(names, raising))
    assert lazy.module_exists(reference) is exists
    assert "acme_pkg" not in sys.modules


def test_an_import_blocker_says_nothing_about_existence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Blocker:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    assert lazy.module_exists("nobody_has_this:x")
