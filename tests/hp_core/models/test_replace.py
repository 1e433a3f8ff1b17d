"""Replacing modules: what matches, what may take a place, and that a failure leaves the model as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_core.contracts.adapter import Replacement
from hp_core.contracts.family import ModuleFamily
from hp_core.contracts.transform import Join, Unflatten
from hp_core.errors import PlanError
from hp_core.models.replace import ModuleReplacementMatchError, Rule, compile_rules, install, prepare
from hp_core.models.state import state_of


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return hidden * self.weight * scale


class SubNorm(Norm):
    pass


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.proj = nn.Linear(4, 4, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.shared = self.layers[0].norm
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class BetterNorm(nn.Module):
    def __init__(self, *, config: Any = None, module: nn.Module | None = None, gain: int = 1) -> None:
        super().__init__()
        assert isinstance(module, Norm)
        self.weight = module.weight
        self.gain = gain

    def forward(self, hidden: Tensor, scale: float = 1.0, extra: int = 0) -> Tensor:
        return hidden * self.weight * scale * self.gain


class Head(nn.Module):
    def __init__(self, *, module: nn.Linear) -> None:
        super().__init__()
        self.weight = module.weight

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return nn.functional.linear(input, self.weight)


class Folded(nn.Module):
    def __init__(self, *, module: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(module.weight.detach().unflatten(0, (2, 2)))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return nn.functional.linear(input, self.weight.flatten(0, 1))


def broken(change: Callable[[nn.Module], None]) -> type[nn.Module]:
    class Broken(BetterNorm):
        def __init__(self, *, module: nn.Module) -> None:
            super().__init__(module=module)
            change(self)

    return Broken


class OtherNorm(BetterNorm):
    pass


class NewArgument(BetterNorm):
    def forward(self, hidden: Tensor, scale: float = 1.0, *, needed: int) -> Tensor:  # type: ignore[override]
        return hidden


class OtherName(BetterNorm):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return x


class NoDefault(BetterNorm):
    def forward(self, hidden: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        return hidden


class NotAModule:
    def __init__(self, *, module: nn.Module) -> None:
        pass


class Raises(nn.Module):
    def __init__(self, *, module: nn.Module) -> None:
        raise ValueError("two\n  lines")


Dropped = broken(lambda module: delattr(module, "weight"))
Added = broken(lambda module: module.register_parameter("bias", nn.Parameter(torch.zeros(4))))
Copied = broken(lambda module: module.register_parameter("weight", nn.Parameter(torch.ones(4))))
Buffered = broken(lambda module: module.register_buffer("count", torch.zeros(1)))
Evaluating = broken(lambda module: module.train(False) and None)


def family(cls: type, **fields: Any) -> ModuleFamily:
    setattr(sys.modules[__name__], cls.__name__, cls)
    return ModuleFamily(name=cls.__name__.lower(), baseline=f"{__name__}:{cls.__name__}", **fields)


def rule(match: str | tuple[str, ...], cls: type = BetterNorm, source: str = "Norm", **fields: Any) -> Rule:
    declared = {key: fields.pop(key) for key in ("exact_type", "arguments") if key in fields}
    by = fields.pop("by", "adapter toy")
    priority = fields.pop("priority", 0)
    fields["arguments"] = fields.pop("accepts", {})
    return Rule(
        replacement=Replacement(match=match, implementation=cls.__name__.lower(), source_type=source, **declared),
        family=family(cls, **fields),
        declared_by=by,
        priority=priority,
    )


def replace(model: nn.Module, *rules: Rule) -> None:
    install(model, prepare(compile_rules(model, rules)))


def message(model: nn.Module, *rules: Rule) -> str:
    before = dict(model.named_modules()), dict(model.named_parameters())
    with pytest.raises(PlanError) as error:
        replace(model, *rules)
    assert (dict(model.named_modules()), dict(model.named_parameters())) == before, "the model has changed"
    return str(error.value)


def test_every_match_is_replaced_and_says_by_whom() -> None:
    model = Model()
    weights = [layer.norm.weight for layer in model.layers]  # type: ignore[union-attr]
    replace(model, rule("layers.*.norm"))
    for index, layer in enumerate(model.layers):
        assert type(layer.norm) is BetterNorm
        assert layer.norm.weight is weights[index]
        state = state_of(layer.norm)
        assert state is not None
        assert (state.fqn, state.family, state.declared_by) == (f"layers.{index}.norm", "betternorm", "adapter toy")
        assert state.source == f"{__name__}:Norm"


def test_a_shared_module_is_one_target_under_all_its_names() -> None:
    model = Model()
    targets = compile_rules(model, [rule("layers.*.norm")])
    assert [target.fqns for target in targets] == [("layers.0.norm", "shared"), ("layers.1.norm",)]
    replace(model, rule("layers.*.norm"))
    assert model.shared is model.layers[0].norm


def test_arguments_reach_the_member() -> None:
    model = Model()
    replace(model, rule("layers.*.norm", arguments={"gain": 3}, accepts={"gain": "int"}))
    assert model.layers[1].norm.gain == 3


def test_tied_weights_stay_one_parameter() -> None:
    model = Model()
    replace(model, rule("head", Head, "Linear"))
    assert type(model.head) is Head
    assert model.head.weight is model.embed.weight


def test_a_transformed_parameter_may_be_another_object() -> None:
    model = Model()
    replace(model, rule("layers.*.proj", Folded, "Linear", transforms={"weight": (Unflatten(0, (2, 2)),)}))
    assert model.layers[0].proj.weight.shape == (2, 2, 4)


class Pair(nn.Module):
    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 2, bias=False, **fields), nn.Linear(4, 2, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat((self.one(hidden), self.other(hidden)), -1)


class Joined(nn.Module):
    def __init__(self, *, module: Pair, rows: int = 4) -> None:
        super().__init__()
        self.both = nn.Linear(1, 1, bias=False)
        whole = torch.cat((module.one.weight, module.other.weight)).detach()
        self.both.weight = nn.Parameter(whole[:rows], requires_grad=module.one.weight.requires_grad)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.both(hidden)


JOINED = {"both.weight": (Join(0, {"one.weight": -1, "other.weight": 2}),)}


def paired(**fields: Any) -> nn.Module:
    model = Model()
    model.pair = Pair(**fields)
    return model


def test_one_parameter_may_stand_for_several() -> None:
    model = paired()
    model.again = model.pair
    hidden = torch.randn(3, 4)
    expected = model.pair(hidden)
    replace(model, rule("pair", Joined, "Pair", transforms=JOINED))
    assert model.again is model.pair
    assert [name for name, _ in model.pair.named_parameters()] == ["both.weight"]
    torch.testing.assert_close(model.pair(hidden), expected)


def frozen_half() -> nn.Module:
    model = paired()
    model.pair.one.requires_grad_(False)
    return model


def without_half() -> nn.Module:
    model = paired()
    model.pair.other.weight = None  # type: ignore[assignment]
    return model


class Half(Joined):
    def __init__(self, *, module: Pair) -> None:
        super().__init__(module=Pair(), rows=3)


JOINS = [
    (paired, Half, "the candidate's both.weight is 12 elements of float32; expected 16 elements of float32"),
    (
        frozen_half,
        Joined,
        "the candidate's both.weight joins one.weight (8 elements of float32, frozen) and other.weight (8 elements of "
        "float32); expected parameters of one dtype, all trained or all frozen",
    ),
    (
        without_half,
        Half,
        "the candidate's both.weight joins other.weight, which the module to replace does not have; expected one.weight, "
        "other.weight",
    ),
]


@pytest.mark.parametrize(("model", "cls", "text"), JOINS)
def test_a_join_of_other_parameters_is_refused(model: Callable[[], nn.Module], cls: type, text: str) -> None:
    assert message(model(), rule("pair", cls, "Pair", transforms=JOINED)) == f"HP541: {text}. pair, adapter toy"


def test_the_recipe_wins_over_the_adapter_on_one_module() -> None:
    model = Model()
    replace(model, rule("layers.*.norm"), rule("layers.1.norm", OtherNorm, priority=1, by="recipe.yaml:3"))
    assert [type(layer.norm).__name__ for layer in model.layers] == ["BetterNorm", "OtherNorm"]


def test_a_pattern_that_hits_nothing_lists_what_is_unmatched() -> None:
    with pytest.raises(ModuleReplacementMatchError) as error:
        compile_rules(Model(), [rule(("layers.*.norm", "layers.0.nrom"))])
    assert error.value.unmatched == (("layers.0.nrom", "adapter toy"),)
    assert str(error.value) == (
        "HP540: the replacement pattern 'layers.0.nrom' matches no module; did you mean 'layers.0.norm'? adapter toy"
    )


def test_another_class_is_refused() -> None:
    assert message(Model(), rule("layers.*.proj")) == "HP540: layers.0.proj is a Linear; expected Norm. adapter toy"


def test_the_class_may_be_given_with_its_module_or_the_end_of_it() -> None:
    for text in (f"{__name__}.Norm", f"{__name__}:Norm", f"...{__name__.rpartition('.')[2]}.Norm"):
        assert len(compile_rules(Model(), [rule("layers.*.norm", source=text)])) == 2


def test_a_subclass_is_accepted_unless_the_type_must_be_exact() -> None:
    model = Model()
    model.layers[0].norm = SubNorm()
    assert len(compile_rules(model, [rule("layers.0.norm")])) == 1
    assert message(model, rule("layers.0.norm", exact_type=True)) == (
        "HP540: layers.0.norm is a SubNorm; expected exactly Norm. adapter toy"
    )


def test_a_module_hit_by_two_rules_is_refused() -> None:
    assert message(Model(), rule("layers.*.norm"), rule("shared", by="recipe.yaml:3")) == (
        "HP540: layers.0.norm is replaced twice: by adapter toy and by recipe.yaml:3; expected one rule for a module"
    )


def test_a_module_and_its_descendant_are_refused() -> None:
    assert message(Model(), rule("layers.1.norm"), rule("layers.1", source="Layer", by="recipe.yaml:3")) == (
        "HP540: layers.1.norm is replaced, and so is layers.1, which contains it. adapter toy; recipe.yaml:3"
    )


def test_an_unknown_argument_is_refused() -> None:
    assert message(Model(), rule("layers.1.norm", arguments={"gian": 1})) == (
        "HP560: family 'betternorm' has no argument 'gian'; did you mean 'gain'?; expected gain. layers.1.norm, adapter toy"
    )


def test_hooks_on_the_source_are_refused() -> None:
    model = Model()
    model.layers[1].norm.register_forward_hook(lambda *_: None)
    assert message(model, rule("layers.1.norm")) == (
        "HP541: the module to replace has forward hooks; expected a module without hooks. layers.1.norm, adapter toy"
    )


CANDIDATES = [
    (NotAModule, "the candidate is a NotAModule; expected a torch module"),
    (Raises, "raises cannot replace it: ValueError: two lines"),
    (Evaluating, "the candidate's training flag is False; expected True"),
    (Dropped, "the candidate lacks the parameter weight; expected the parameters of the module it replaces"),
    (Added, "the candidate has a new parameter bias; expected the parameters of the module it replaces"),
    (Copied, "the candidate's parameter weight is another object; expected the same one"),
    (Buffered, "the candidate has a new buffer count; expected the buffers of the module it replaces"),
]


@pytest.mark.parametrize(("cls", "text"), CANDIDATES)
def test_a_candidate_that_breaks_the_contract_is_refused(cls: type, text: str) -> None:
    assert message(Model(), rule("layers.1.norm", cls)) == f"HP541: {text}. layers.1.norm, adapter toy"


SIGNATURES = [
    (NewArgument, "requires 'needed'"),
    (OtherName, "does not take 'hidden' in place 1"),
    (NoDefault, "requires 'scale'"),
]


@pytest.mark.parametrize(("cls", "problem"), SIGNATURES)
def test_a_forward_that_refuses_a_legal_call_is_refused(cls: type, problem: str) -> None:
    text = message(Model(), rule("layers.1.norm", cls))
    assert text.startswith("HP541: the candidate's forward(self, ")
    assert f") -> 'Tensor' {problem}; expected every call of forward(self, hidden: 'Tensor', scale: 'float' = 1.0)" in text


def test_a_failure_in_the_last_candidate_leaves_the_first_uninstalled() -> None:
    assert message(Model(), rule("layers.0.norm"), rule("layers.1.norm", Dropped)).startswith("HP541: the candidate lacks")


class Untied(nn.Module):
    def __init__(self, *, module: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(module.weight.detach().clone())

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input


def test_a_broken_tie_is_refused_and_undone() -> None:
    rules = rule("layers.0.norm"), rule("head", Untied, "Linear", transforms={"weight": ()})
    assert message(Model(), *rules) == (
        "HP541: head.weight and embed.weight are no longer one parameter; expected a tie that stays"
    )
