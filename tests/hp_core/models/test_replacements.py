"""All replacements at once: a failure at any step leaves the model exactly as it was, and observers hear what happened."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_core.contracts.adapter import Replacement
from hp_core.contracts.family import FamilyContext, ModuleFamily, SelectorSpec, VariantRule
from hp_core.errors import PlanError
from hp_core.models import replacements
from hp_core.models.inventory import original_class, take_inventory
from hp_core.models.observers import ReplacementApplied, ReplacementsDeclared, ReplacementUnmatched
from hp_core.models.replace import ModuleReplacementMatchError, Rule
from hp_core.models.replace_methods import MethodRule
from hp_core.models.replacements import replace_all
from hp_core.models.state import state_of


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return hidden * self.weight * scale

    def half(self) -> Norm:  # type: ignore[override]
        return self

    def double_it(self, hidden: Tensor) -> Tensor:
        return hidden * 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.proj = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())

    def forward(self, hidden: Tensor) -> Tensor:
        return self.proj(self.norm(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.shared = self.layers[0].norm
        self.register_buffer("count", torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.shared(hidden)


class NewNorm(nn.Module):
    def __init__(self, *, module: nn.Module) -> None:
        super().__init__()
        self.weight = module.weight

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return hidden * self.weight * scale + 1

    def double_it(self, hidden: Tensor) -> Tensor:
        return hidden * 2


class Selected(NewNorm):
    def __init__(self, *, module: nn.Module, module_fqn: str, context: FamilyContext, mesh: Any, mode: str = "a") -> None:
        super().__init__(module=module)
        self.given = (module_fqn, context, mesh, mode)


class NewProj(nn.Module):
    """Keeps the child that holds a parameter, drops the activation."""

    def __init__(self, *, module: nn.Sequential) -> None:
        super().__init__()
        self.add_module("0", module[0])

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.get_submodule("0")(input)


class CopiedChild(NewProj):
    def __init__(self, *, module: nn.Sequential) -> None:
        super().__init__(module=module)
        child = nn.Linear(4, 4, bias=False)
        child.weight = module[0].weight
        self.add_module("0", child)


class Vandal(NewNorm):
    """Takes its source apart, and then fails if told to."""

    def __init__(self, *, module: nn.Module, fail: bool = False) -> None:
        super().__init__(module=module)
        del module.weight
        module.scar = 1
        if fail:
            raise RuntimeError("half done")


def tripled(self: nn.Module, hidden: Tensor, *, more: int = 0) -> Tensor:
    return hidden * 3 + more


def refusing(self: nn.Module, hidden: Tensor, needed: int) -> Tensor:
    return hidden


def rule(match: str, cls: type = NewNorm, source: str = "Norm", *, arguments: Any = None, **fields: Any) -> Rule:
    family = ModuleFamily(name=cls.__name__.lower(), baseline=f"{__name__}:{cls.__qualname__}", **fields)
    replacement = Replacement(match=match, implementation=family.name, source_type=source, arguments=arguments or {})
    return Rule(replacement=replacement, family=family, declared_by="recipe.yaml:3", id="overrides.0")


def method(match: str, function: Callable[..., Any] = tripled, **fields: Any) -> MethodRule:
    family = ModuleFamily(name=function.__name__, baseline=f"{__name__}:{function.__name__}")
    return MethodRule(match=match, family=family, declared_by="recipe.yaml:7", id="overrides.1", **fields)


def anatomy(model: nn.Module) -> Any:
    """Everything that a model is made of, by identity, and the bytes of its tensors."""
    parts = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        attributes = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        parts.append(
            (
                fqn,
                id(module),
                type(module),
                repr(sorted(attributes)),
                {k: list(map(id, v.values())) for k, v in attributes.items() if isinstance(v, dict)},
            )
        )
    tensors = [
        (name, id(t), pickle.dumps(t.detach().tolist())) for name, t in (*model.named_parameters(), *model.named_buffers())
    ]
    return parts, tensors, list(model.state_dict())


def message(model: nn.Module, *rules: Rule, methods: tuple[MethodRule, ...] = ()) -> str:
    before = anatomy(model)
    with pytest.raises(PlanError) as error:
        replace_all(model, rules, methods=methods)
    assert anatomy(model) == before
    return str(error.value)


def test_modules_and_then_methods_are_replaced_and_recorded() -> None:
    model, events = Model(), []
    records = replace_all(
        model, [rule("layers.*.norm")], methods=[method("layers.*.norm.double_it")], observers=[events.append]
    )
    assert [(r.kind, r.fqn, r.aliases, r.rule, r.variant) for r in records] == [
        ("module", "layers.0.norm", ("shared",), "overrides.0", "baseline"),
        ("module", "layers.1.norm", (), "overrides.0", "baseline"),
        ("method", "layers.0.norm.double_it", (), "overrides.1", "baseline"),
        ("method", "layers.1.norm.double_it", (), "overrides.1", "baseline"),
    ]
    assert [type(event) for event in events] == [ReplacementsDeclared, *[ReplacementApplied] * 4]
    norm = model.layers[1].norm
    assert norm.double_it(torch.ones(1)).item() == 3
    assert original_class(type(norm)) is NewNorm
    assert type(norm) is type(model.shared)
    assert Model().layers[1].norm.double_it(torch.ones(1)).item() == 2


def test_a_shared_module_stays_one_object_and_one_entry_of_the_inventory() -> None:
    model = Model()
    replace_all(model, [rule("shared")])
    assert model.shared is model.layers[0].norm
    inventory = take_inventory(model, config={})
    assert inventory.module_aliases == {"shared": "layers.0.norm"}
    assert inventory.names("layers.0.norm") == ("layers.0.norm", "shared")
    assert inventory.aliases == {"shared.weight": "layers.0.norm.weight"}


def test_a_member_is_given_what_its_signature_asks_for() -> None:
    model = Model()
    fields = {
        "selectors": {"mode": SelectorSpec(choices=("a", "b"), default="a")},
        "variants": {"self": f"{__name__}:Selected"},
        "rules": [VariantRule(when={"mode": "b"}, variant="self")],
    }
    records = replace_all(
        model, [rule("layers.1.norm", Selected, arguments={"mode": "b"}, **fields)], context=FamilyContext(cp=2), mesh="mesh"
    )
    assert model.layers[1].norm.given == ("layers.1.norm", FamilyContext(cp=2), "mesh", "b")
    assert (records[0].variant, records[0].selectors) == ("self", {"mode": "b"})
    state = state_of(model.layers[1].norm)
    assert state is not None
    assert (state.origin, state.request.kwargs, state.resolved.variant) == ("replacement", {"mode": "b"}, "self")


def test_children_that_hold_something_are_kept_and_others_may_go() -> None:
    model = Model()
    child = model.layers[0].proj[0]
    replace_all(model, [rule("layers.0.proj", NewProj, "Sequential")])
    assert model.layers[0].proj.get_submodule("0") is child


def test_another_child_of_the_same_name_is_refused() -> None:
    assert message(Model(), rule("layers.0.proj", CopiedChild, "Sequential")) == (
        "HP541: the candidate holds another child 0; expected the children of the module it replaces. "
        "layers.0.proj, recipe.yaml:3"
    )


def test_hooks_below_the_source_are_refused() -> None:
    model = Model()
    model.layers[0].proj[1].register_forward_hook(lambda *_: None)
    assert message(model, rule("layers.0.proj", NewProj, "Sequential")) == (
        "HP541: the module to replace has forward hooks on 1; expected a module without hooks. layers.0.proj, recipe.yaml:3"
    )


class Itself(nn.Module):
    def __new__(cls, *, module: nn.Module) -> Any:
        return module


def test_the_source_is_no_candidate() -> None:
    assert message(Model(), rule("layers.1.norm", Itself)) == (
        "HP541: the candidate is the module to replace; expected another module. layers.1.norm, recipe.yaml:3"
    )


def test_a_source_that_its_candidate_took_apart_is_put_together_again() -> None:
    model = Model()
    weight = model.layers[1].norm.weight
    replace_all(model, [rule("layers.1.norm", Vandal)])
    assert model.layers[1].norm.weight is weight
    assert message(Model(), _failing()) == (
        "HP541: vandal cannot replace it: RuntimeError: half done. layers.1.norm, recipe.yaml:3"
    )


def _failing() -> Rule:
    family = ModuleFamily(name="vandal", baseline=f"{__name__}:Vandal", arguments={"fail": "bool"})
    replacement = Replacement(match="layers.1.norm", implementation="vandal", source_type="Norm", arguments={"fail": True})
    return Rule(replacement=replacement, family=family, declared_by="recipe.yaml:3")


STEPS = ["compile_rules", "prepare", "install", "compile_methods", "install_methods"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_injected_at_any_step_leaves_the_model_as_it_was(monkeypatch, step: str, after: bool) -> None:
    given = getattr(replacements, step)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if after:
            given(*args, **kwargs)
        raise OSError("injected")

    monkeypatch.setattr(replacements, step, failing)
    model = Model()
    before, output = anatomy(model), model(torch.ones(4))
    with pytest.raises(OSError, match="injected"):
        replace_all(model, [rule("layers.*.norm")], methods=[method("layers.*.norm.double_it")])
    assert anatomy(model) == before
    assert torch.equal(model(torch.ones(4)), output)


@pytest.mark.parametrize("number", range(5))
def test_an_observer_that_fails_leaves_the_model_as_it_was(number: int) -> None:
    calls = iter(range(10))

    def observer(event: Any) -> None:
        if next(calls) == number:
            raise KeyboardInterrupt

    model = Model()
    before = anatomy(model)
    with pytest.raises(KeyboardInterrupt):
        replace_all(model, [rule("layers.*.norm")], methods=[method("layers.*.norm.double_it")], observers=[observer])
    assert anatomy(model) == before


def test_unmatched_patterns_are_told_and_survive_a_pickle() -> None:
    events: list[Any] = []
    with pytest.raises(ModuleReplacementMatchError) as error:
        replace_all(Model(), [rule("layers.*.nrom"), rule("x")], observers=[events.append])
    assert events == [
        ReplacementUnmatched(pattern="layers.*.nrom", declared_by="recipe.yaml:3"),
        ReplacementUnmatched(pattern="x", declared_by="recipe.yaml:3"),
    ]
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.unmatched, str(again)) == (error.value.unmatched, str(error.value))
    assert str(again) == (
        "HP540: the replacement pattern 'layers.*.nrom' matches no module; did you mean 'layers.1.norm'?, nor 'x'. "
        "recipe.yaml:3"
    )


METHODS = [
    (method("layers.*.nrom.double_it"), "HP540: the replacement pattern 'layers.*.nrom.double_it' matches no module; did you"),
    (
        method("layers.1.norm.duoble_it"),
        "HP540: layers.1.norm (Norm) has no method 'duoble_it'; did you mean 'double_it'?; expected a method that its class "
        "defines. recipe.yaml:7",
    ),
    (method("layers.1.norm.train"), "HP540: layers.1.norm (Norm) has no method 'train'"),
    (
        method("layers.1.norm.double_it", source_type="Layer"),
        "HP540: layers.1.norm is a Norm; expected Layer. recipe.yaml:7",
    ),
    (
        method("layers.1.norm.double_it", refusing),
        "HP541: refusing(self: 'nn.Module', hidden: 'Tensor', needed: 'int') -> 'Tensor' requires 'needed'; expected every "
        "call of double_it(self, hidden: 'Tensor') -> 'Tensor' to work. layers.1.norm.double_it, recipe.yaml:7",
    ),
    (
        method("layers.1.norm.double_it", NewNorm),
        f"HP541: NewNorm is a type, {__name__}:NewNorm; expected a function (self, ...), to replace a method. recipe.yaml:7",
    ),
]


@pytest.mark.parametrize(("wrong", "text"), METHODS, ids=range(len(METHODS)))
def test_a_method_that_does_not_fit_is_refused(wrong: MethodRule, text: str) -> None:
    assert message(Model(), methods=(wrong,)).startswith(text)


def test_a_method_hit_by_two_rules_is_refused() -> None:
    assert message(Model(), methods=(method("layers.*.norm.double_it"), method("layers.1.norm.double_it"))) == (
        "HP540: layers.1.norm.double_it is replaced twice: by recipe.yaml:7 and by recipe.yaml:7; expected one rule "
        "for a method"
    )


def test_the_forward_of_the_root_may_be_replaced() -> None:
    model = Model()
    records = replace_all(model, [], methods=[method("forward")])
    assert records[0].fqn == "forward"
    assert model(torch.ones(1)).item() == 3
