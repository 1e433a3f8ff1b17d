"""The model's boundary: labels travel past Hugging Face's code straight to the loss component."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from hp_core.applier.derive import derive
from hp_core.errors import PlanError

LABELS = "hp_labels"


def check_loss(model: nn.Module, *, loss: str | None) -> None:
    """Raise HP551 unless the component ``loss``, if there is one, takes labels."""
    if loss is None:
        return
    component = model.get_submodule(loss)
    if not hasattr(component, "bind_labels"):
        raise PlanError(
            "HP551",
            f"{loss} is a {type(component).__name__} and takes no labels",
            expected="a component with bind_labels(labels), such as linear_cross_entropy",
        )


def install_labels(model: nn.Module) -> None:
    """Let ``model`` take the keyword ``hp_labels`` [B, S] (already shifted, -100 ignored) for ``model.hp.loss``.

    With labels the model's ``.logits`` are fp32 token losses [B, S], 0 where ignored; without them they are logits.
    """
    derive(model, _labelled)


def loss_component(model: nn.Module) -> Any:
    """Return the component that takes the labels; HP551 if the model has none."""
    fqn = model.__dict__["hp"].loss
    if fqn is None:
        raise PlanError("HP551", f"the model is called with {LABELS}", expected="an adapter that names a loss component")
    return model.get_submodule(fqn)


def _labelled(cls: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, hp_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if hp_labels is None:
            return cls.forward(self, *args, **kwargs)
        with loss_component(self).bind_labels(hp_labels):
            return cls.forward(self, *args, **kwargs)

    return {"forward": forward}
