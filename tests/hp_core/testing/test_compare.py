"""The comparison: what is allowed, what is not, and that nothing passes by not being compared."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import Tensor

from hp_core.testing.cell import Cell, CellReport, Deviation, ModelCase
from hp_core.testing.compare import EXACT, deviations, disagreements, kind, low_precision, rms_errors
from hp_core.testing.reference import Step


def step(**changes: object) -> Step:
    """A step of a model with a large, a small and a frozen parameter."""
    gradients = {"a": torch.full((40, 40), 2.0), "b.0.c": torch.full((4,), 1e-6), "frozen": None}
    parameters = {"a": torch.ones(40, 40), "b.0.c": torch.ones(4), "frozen": torch.ones(2)}
    made = Step(loss=2.0, norm=3.0, gradients=gradients, parameters=parameters, next_loss=1.0, aliases={"head": "a"})
    return attrs.evolve(made, **changes)


def with_gradient(name: str, gradient: Tensor | None) -> Step:
    return step(gradients={**step().gradients, name: gradient})


def passed(found: Step) -> bool:
    report = CellReport(
        cell="x",
        deviations=deviations(found, step(), tolerance=EXACT),
        disagreements=disagreements(found, step()),
    )
    return report.passed


def test_a_step_equals_itself() -> None:
    assert passed(step())


@pytest.mark.parametrize("quantity", ["loss", "norm", "next_loss"])
def test_a_scalar_may_differ_by_a_billionth(quantity: str) -> None:
    value = getattr(step(), quantity)
    assert passed(step(**{quantity: value * (1 + 9e-10)}))
    assert not passed(step(**{quantity: value * (1 + 2e-9)}))


def test_one_wrong_element_is_seen() -> None:
    wrong = torch.full((40, 40), 2.0, dtype=torch.float64)
    wrong[3, 4] += 3e-9
    assert not passed(with_gradient("a", wrong))


def test_a_tiny_gradient_is_held_against_the_model_s_largest() -> None:
    allowed = 1e-12 * 2.0
    assert passed(with_gradient("b.0.c", torch.full((4,), 1e-6, dtype=torch.float64) + 0.9 * allowed))
    assert not passed(with_gradient("b.0.c", torch.full((4,), 1e-6, dtype=torch.float64) + 2 * allowed))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_pass(value: float) -> None:
    assert not passed(with_gradient("a", torch.full((40, 40), value)))
    assert not passed(step(loss=value))


def test_a_missing_gradient_is_a_disagreement() -> None:
    assert disagreements(with_gradient("b.0.c", None), step()) == ("gradients missing: b.0.c",)


def test_a_gradient_of_a_frozen_parameter_is_a_disagreement() -> None:
    assert disagreements(with_gradient("frozen", torch.zeros(2)), step()) == ("gradients that the reference lacks: frozen",)


def test_a_broken_tie_is_a_disagreement() -> None:
    assert disagreements(step(aliases={}), step()) == ("tied names missing: ('head', 'a')",)


def test_another_shape_is_a_disagreement() -> None:
    found = step(parameters={**step().parameters, "a": torch.ones(40, 1)})
    assert disagreements(found, step()) == ("a has shape (40, 1), the reference (40, 40)",)


def test_small_tensors_are_pooled_by_kind() -> None:
    exact = step(gradients={"w.0.n": torch.zeros(3), "w.1.n": torch.zeros(1), "m": torch.zeros(1024)})
    found = step(gradients={"w.0.n": torch.ones(3), "w.1.n": torch.full((1,), 3.0), "m": torch.full((1024,), 2.0)})
    assert rms_errors(found, exact) == {"w.*.n": 3**0.5, "m": 2.0}
    assert kind("model.layers.11.mlp.experts.3.weight") == "model.layers.*.mlp.experts.*.weight"


def test_low_precision_is_held_against_one_process() -> None:
    exact = step(gradients={"m": torch.zeros(1024)})
    found = step(gradients={"m": torch.full((1024,), 0.3)})
    assert all(item.passed for item in low_precision(found, exact, {"m": 0.21}))
    assert not all(item.passed for item in low_precision(found, exact, {"m": 0.19}))


def test_the_smallest_kinds_are_held_together() -> None:
    exact = step(gradients={"m": torch.zeros(1024), "a": torch.zeros(2), "b": torch.zeros(2)})
    found = step(gradients={"m": torch.full((1024,), 0.3), "a": torch.full((2,), 1.7), "b": torch.full((2,), 0.6)})
    ratio = low_precision(found, exact, {"m": 0.3, "a": 1.0, "b": 1.0})[1]
    assert (ratio.quantity, ratio.name) == ("gradient rms ratio", "a, b")
    assert ratio.passed
    assert ratio.error == pytest.approx(((1.7**2 + 0.6**2) / 2) ** 0.5)
    assert not low_precision(found, exact, {"m": 0.3, "a": 0.5, "b": 1.0})[1].passed


def report(*items: Deviation, disagreements: tuple[str, ...] = ()) -> CellReport:
    return CellReport(cell="x", deviations=items, disagreements=disagreements, seconds=1.0, margin=0.5)


def deviation(quantity: str, error: float) -> Deviation:
    return Deviation(quantity=quantity, name="w", error=error, allowed=1.0)


def test_ranks_are_merged_to_the_worst_of_each_quantity() -> None:
    merged = report(deviation("loss", 0.1), deviation("gradient", 0.2)).worse(
        report(deviation("loss", 3.0), deviation("gradient", 0.1), disagreements=("tied names missing: a",))
    )
    assert str(merged).splitlines() == [
        "x: FAILED (1.0 s, margin 5.0e-01)",
        "  tied names missing: a",
        "  FAILED loss w: 3.00e+00 (allowed 1.00e+00)",
        "  ok gradient w: 2.00e-01 (allowed 1.00e+00)",
    ]


def test_not_a_number_is_worse_than_anything() -> None:
    merged = report(deviation("loss", float("nan"))).worse(report(deviation("loss", 100.0)))
    assert not merged.passed
    assert merged.deviations[0].severity == float("inf")


def test_a_report_that_compared_nothing_does_not_pass() -> None:
    assert not report().passed


def test_a_cell_is_a_recipe() -> None:
    cell = Cell(name="x", model=ModelCase(adapter="m", config={"a": 1}, freeze=("w",)), precision="bfloat16")
    data = cell.recipe_data()
    assert data["model"] == {"adapter": "m", "config": {"a": 1}, "dtype": "float32"}
    assert data["precision"] == {"compute": "bfloat16", "reduce": "float32"}
    assert data["freeze"] == ["w"]
    assert data["mesh"]["tp"] == 1


def test_a_model_case_is_known_by_its_content() -> None:
    assert ModelCase(adapter="m", config={"a": 1}).key() == ModelCase(adapter="m", config={"a": 1}).key()
    assert ModelCase(adapter="m", config={"a": 1}).key() != ModelCase(adapter="m", config={"a": 2}).key()
