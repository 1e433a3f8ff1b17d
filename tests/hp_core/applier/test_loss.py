"""Labels travel from the model's call to the loss component, for that call only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from hp_core.applier.loss import check_loss, install_labels
from hp_core.errors import PlanError
from hp_core.models.state import update


class Head(nn.Module):
    labels: Tensor | None = None

    @contextmanager
    def bind_labels(self, labels: Tensor) -> Iterator[None]:
        self.labels = labels
        yield
        self.labels = None

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.labels is None else hidden - self.labels


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()
        self.plain = nn.Linear(2, 2)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(hidden) * scale


def model(loss: str | None) -> Model:
    made = Model()
    update(made, "", loss=loss)
    install_labels(made)
    return made


def test_labels_reach_the_component_and_the_other_arguments_the_model() -> None:
    assert model("head")(torch.ones(2), 3.0, hp_labels=torch.tensor([1.0, 0.0])).tolist() == [0.0, 3.0]


def test_without_labels_nothing_is_bound() -> None:
    made = model("head")
    made(torch.ones(2), hp_labels=torch.ones(2))
    assert made(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_component_that_takes_no_labels_is_refused() -> None:
    with pytest.raises(PlanError) as error:
        check_loss(Model(), loss="plain")
    assert str(error.value) == (
        "HP551: plain is a Linear and takes no labels; "
        "expected a component with bind_labels(labels), such as linear_cross_entropy"
    )


def test_labels_without_a_component_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        model(None)(torch.ones(2), hp_labels=torch.ones(2))
    assert str(error.value) == "HP551: the model is called with hp_labels; expected an adapter that names a loss component"
