"""Stage 5, the references: each kind of object that a field may point to, and what is said about another."""

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from torch import nn

from hp_core.contracts import (
    Command,
    EPContext,
    Init,
    Kernel,
    LayoutRule,
    ModelAdapter,
    ModuleFamily,
    NativeParallelBindingRequest,
    ParallelModuleSpec,
    PrecisionScheme,
    Protocol,
    RecipeSection,
)
from hp_core.contracts.kernel import CALLS, OPS
from hp_core.errors import DeclarationError
from hp_core.plugins import lazy
from hp_core.plugins.places import defined
from hp_core.plugins.record import Loaded, PluginRecord
from hp_core.testing.resolve import resolve


class Module(nn.Module):
    """A class of torch modules that keeps the contract of a family's member."""

    def __init__(self, *, module: Any = None, eps: float = 0.0) -> None:
        super().__init__()


class Closed(nn.Module):
    """A member that takes nothing."""

    def __init__(self) -> None:
        super().__init__()


class Open(nn.Module):
    """A member that takes every keyword."""

    def __init__(self, **options: Any) -> None:
        super().__init__()


class Needy(nn.Module):
    """A member that needs what nobody can give."""

    def __init__(self, *, module: Any, width: int) -> None:
        super().__init__()


class OddSpec(Open):
    """A member whose spec is none."""

    parallel_spec = {"protocol": "acme"}


class Unbound(Open):
    """A member that says that it is bound and has no method for it."""

    parallel_spec = ParallelModuleSpec(protocol="acme", binding_kind="mesh", validate="builtins:divmod")


class Unchecked(Open):
    """A member whose validate takes something else."""

    parallel_spec = ParallelModuleSpec(protocol="acme", binding_kind="mesh", validate="builtins:abs")

    def bind_parallel(self, binding: Any) -> None:
        """Take the mesh."""


class Experts(EPContext):
    """A complete ep context."""

    def __init__(self, mesh: Any, options: Any) -> None:
        """Take nothing."""

    def dispatch(self, hidden: Any, expert_indices: Any, routing_weights: Any) -> Any:
        """Stand for sending."""

    def combine(self, values: Any, receipt: Any) -> Any:
        """Stand for fetching."""


@attrs.frozen
class Schema:
    """A section's schema."""


CODE = SimpleNamespace(
    Module=Module,
    Closed=Closed,
    Open=Open,
    Needy=Needy,
    OddSpec=OddSpec,
    Unbound=Unbound,
    Unchecked=Unchecked,
    Experts=Experts,
    Schema=Schema,
    NUMBER=3,
    function=lambda self, x: x,
    none=lambda: None,
    norm=lambda x, weight, *, eps, offset=0.0: None,
    one=lambda a: None,
    two=lambda a, b: None,
    many=lambda *a: None,
)


@pytest.fixture(autouse=True)
def _code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``acme_code:X`` point into this file."""
    monkeypatch.setitem(sys.modules, "acme_code", CODE)


def loaded(kind: str, declaration: Any) -> Loaded:
    """Return a plugin with one declaration."""
    return Loaded(record=PluginRecord(name="acme", distribution="acme-hp", version="2.0"), declarations=((kind, declaration),))


def family(**fields: Any) -> tuple[str, ModuleFamily]:
    """Return a family whose baseline is right unless given."""
    return "family", ModuleFamily(**{"name": "norm", "baseline": "acme_code:Module", **fields})


def adapter(**fields: Any) -> tuple[str, ModelAdapter]:
    """Return an adapter whose classes are right unless given."""
    return "adapter", ModelAdapter(
        **{"name": "moe", "model_class": "acme_code:Module", "config_class": "acme_code:Schema", **fields}
    )


def kernel(**fields: Any) -> tuple[str, Kernel]:
    """Return a kernel whose implementation is right unless given."""
    return "kernel", Kernel(**{"op": "rms_norm", "name": "fast", "device": "cpu", "implementation": "acme_code:norm", **fields})


RULE = LayoutRule(name="norm", module_class="Norm", provider="acme_code:two")
LEGAL = [
    (*family(arguments={"eps": "float"}, sharding="acme_code:two", validate="acme_code:many"), 3),
    (*family(baseline="acme_code:function"), 1),
    (*family(baseline="acme_code:Open", variants={"fast": "acme_code:Module"}), 2),
    (*adapter(layout=[RULE], counts="acme_code:one", flops="acme_code:two", residual="acme_code:one"), 6),
    (*kernel(condition="acme_code:one"), 2),
    (*kernel(implementation="nobody_has:it", requires=("nobody_has",)), 0),
    ("protocol", Protocol(kind="ep", name="acme", implementation="acme_code:Experts"), 1),
    ("scheme", PrecisionScheme(name="acme", compute="bfloat16", implementation="acme_code:two"), 1),
    ("scheme", PrecisionScheme(name="acme", compute="bfloat16"), 0),
    ("section", RecipeSection(name="acme", schema="acme_code:Schema"), 1),
    ("command", Command(name="acme", help="Do it", main="acme_code:two"), 1),
]


@pytest.mark.parametrize(("kind", "declaration", "count"), LEGAL)
def test_what_keeps_its_contract_is_loaded_and_counted(kind: str, declaration: Any, count: int) -> None:
    assert resolve(loaded(kind, declaration)) == count


REFUSED = [
    (
        "scheme",
        PrecisionScheme(name="acme", compute="bfloat16", implementation="acme_code:none"),
        "scheme acme: implementation 'acme_code:none' takes (); expected (module, compute)",
    ),
    (
        *family(baseline="acme_code:Schema"),
        "family norm: baseline 'acme_code:Schema' is the class Schema; expected a class of torch modules",
    ),
    (
        *family(baseline="acme_code:function", sharding="acme_code:two"),
        "family norm: baseline 'acme_code:function' is a function; expected a class of torch modules",
    ),
    (*family(sharding="acme_code:one"), "family norm: sharding 'acme_code:one' takes (a); expected (info, context)"),
    (
        *family(baseline="acme_code:OddSpec"),
        "parallel_spec of OddSpec is a dict; expected a ParallelModuleSpec",
    ),
    (
        *family(baseline="acme_code:Unbound"),
        "parallel_spec of Unbound: binding_kind is 'mesh'; expected a method bind_parallel(binding)",
    ),
    (
        *family(baseline="acme_code:Unchecked"),
        "family norm: baseline 'acme_code:Unchecked': validate 'builtins:abs' takes (x, /); expected (info, sharding, context)",
    ),
    (
        *adapter(model_class="acme_code:one"),
        "adapter moe: model_class 'acme_code:one' is a function; expected a class of torch modules",
    ),
    (*adapter(config_class="acme_code:NUMBER"), "adapter moe: config_class 'acme_code:NUMBER' is a int; expected a class"),
    (
        *adapter(layout=[attrs.evolve(RULE, provider="acme_code:NUMBER")]),
        "adapter moe: layout.norm.provider 'acme_code:NUMBER' is a int; expected a function of (info, context)",
    ),
    (
        *adapter(init=[Init(match="*", kind="computed", function="acme_code:none")]),
        "adapter moe: init for '*'.function 'acme_code:none' takes (); expected (model, fqn)",
    ),
    (
        *adapter(shrink="acme_code:one"),
        "adapter moe: shrink 'acme_code:one' takes (a); expected (config, degrees)",
    ),
    (
        *adapter(
            bindings=[
                NativeParallelBindingRequest(
                    match="*.attn", parallel=ParallelModuleSpec(protocol="acme", binding_kind="cp", validate="acme_code:one")
                )
            ]
        ),
        "adapter moe: bindings for '*.attn'.validate 'acme_code:one' takes (a); expected (info, sharding, context)",
    ),
    (
        *kernel(implementation="acme_code:NUMBER"),
        "kernel rms_norm@fast: implementation 'acme_code:NUMBER' is a int; expected a function",
    ),
    (
        *kernel(implementation="acme_code:two"),
        "kernel rms_norm@fast: implementation 'acme_code:two' takes (a, b); expected (x, weight, *, eps, offset)",
    ),
    (
        *kernel(condition="acme_code:none"),
        "kernel rms_norm@fast: condition 'acme_code:none' takes (); expected (shapes)",
    ),
    (
        "protocol",
        Protocol(kind="cp", name="acme", implementation="acme_code:Experts"),
        "protocol cp:acme: implementation 'acme_code:Experts' is the class Experts; "
        "expected a subclass of hp_core.contracts.CPContext",
    ),
    (
        "protocol",
        Protocol(kind="ep", name="acme", implementation="acme_code:Experts", validate="acme_code:one"),
        "protocol ep:acme: validate 'acme_code:one' takes (a); expected (options, config, topology)",
    ),
    (
        "section",
        RecipeSection(name="acme", schema="acme_code:Module"),
        "section acme: schema 'acme_code:Module' is the class Module; expected an attrs class",
    ),
    (
        "command",
        Command(name="acme", help="Do it", main="acme_code:one"),
        "command acme: main 'acme_code:one' takes (a); expected (argv, plugins)",
    ),
]


@pytest.mark.parametrize(("kind", "declaration", "message"), REFUSED, ids=[case[2][:60] for case in REFUSED])
def test_what_breaks_its_contract_is_refused_in_words(kind: str, declaration: Any, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        resolve(loaded(kind, declaration))
    assert caught.value.line == f"hp: error[HP402]: {message}. plugin 'acme' (acme-hp 2.0)"


MEMBERS = [
    (
        family(baseline="acme_code:Closed"),
        Closed,
        "baseline 'acme_code:Closed' takes (); expected the keyword module or config",
        "",
    ),
    (
        family(variants={"fast": "acme_code:Closed"}),
        Closed,
        "variants.fast 'acme_code:Closed' takes (); expected the keyword module or config",
        "",
    ),
    (
        family(baseline="acme_code:Open", arguments={"gain": "float"}),
        Open,
        "baseline 'acme_code:Open' does not take the declared argument 'gain'; expected no arguments",
        ". fix: take 'gain' in Open.__init__, or do not declare it",
    ),
    (
        family(arguments={"epz": "float"}),
        Module,
        "baseline 'acme_code:Module' does not take the declared argument 'epz'; did you mean 'eps'?; expected eps",
        ". fix: take 'epz' in Module.__init__, or do not declare it",
    ),
    (
        family(arguments={"eps": "float"}, variants={"fast": "acme_code:Open"}),
        Open,
        "variants.fast 'acme_code:Open' does not take the declared argument 'eps'; expected no arguments",
        ". fix: take 'eps' in Open.__init__, or do not declare it",
    ),
    (
        family(variants={"fast": "acme_code:Needy"}),
        Needy,
        "variants.fast 'acme_code:Needy' needs 'width', which the family does not declare",
        ". fix: declare 'width', or give it a default in Needy.__init__",
    ),
]


@pytest.mark.parametrize(("declared", "cls", "message", "fix"), MEMBERS)
def test_a_class_that_does_not_take_what_its_family_declares_is_named_with_its_line(
    declared: tuple[str, ModuleFamily], cls: type, message: str, fix: str
) -> None:
    with pytest.raises(DeclarationError) as caught:
        resolve(loaded(*declared))
    where = f"plugin 'acme' (acme-hp 2.0). {defined(cls)}"
    assert caught.value.line == f"hp: error[HP402]: family norm: {message}. {where}{fix}"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nobody_has:it", "'nobody_has:it' fails to import: ModuleNotFoundError: No module named 'nobody_has'"),
        ("acme_code:Modul", "'acme_code:Modul' points to nothing: namespace has no 'Modul'; did you mean 'Module'?"),
    ],
)
def test_a_reference_that_does_not_load_names_its_field(reference: str, message: str) -> None:
    CODE.__name__ = "namespace"
    with pytest.raises(DeclarationError) as caught:
        resolve(loaded(*family(baseline=reference)))
    end = "" if message.endswith("?") else "."
    assert caught.value.line == f"hp: error[HP403]: family norm: baseline: {message}{end} plugin 'acme' (acme-hp 2.0)"


@pytest.mark.parametrize("op", OPS)
def test_the_references_of_all_operators_are_called_as_kernels_are(op: str) -> None:
    kernels = pytest.importorskip("hp_components.kernel_list").kernels
    reference = {item.op: item.implementation for item in kernels() if item.name == "reference"}[op]
    signature = inspect.signature(lazy.load(reference))
    by_place = [name for name, item in signature.parameters.items() if item.kind is item.POSITIONAL_OR_KEYWORD]
    by_name = [name for name, item in signature.parameters.items() if item.kind is item.KEYWORD_ONLY]
    places, names = CALLS[op]
    assert [name.rpartition("_")[0] or name for name in by_place] == list(places)
    assert tuple(by_name) == names
