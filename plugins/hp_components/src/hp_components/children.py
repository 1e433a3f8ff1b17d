"""The children of a component: those of the module it replaces, or new ones, under Hugging Face's names."""

from __future__ import annotations

from typing import Any

from torch import nn

from hp_components.source import empty_parameter, refuse


class Norm(nn.Module):
    """The weight [H] and epsilon of an RMSNorm inside a component, which computes it with its own kernel."""

    def __init__(self, size: int, *, eps: float, config: Any) -> None:
        super().__init__()
        self.weight = empty_parameter(size, config=config)
        self.eps = eps


def linear(inputs: int, outputs: int, *, bias: bool = False, config: Any) -> nn.Linear:
    """Return a new linear layer in the configuration's dtype, on the current device, not initialised."""
    made = nn.Linear(1, 1, bias=False, device="meta")
    made.in_features, made.out_features = inputs, outputs
    made.weight = empty_parameter(outputs, inputs, config=config)
    made.bias = empty_parameter(outputs, config=config) if bias else None  # type: ignore[assignment]
    return made


def take_children(component: str, module: nn.Module, *names: str) -> dict[str, nn.Module]:
    """Return the very children ``names`` of ``module``; HP541 if one is missing."""
    found = {}
    for name in names:
        child = module._modules.get(name)
        if child is None:
            raise refuse(component, f"no {name}", expected=", ".join(names))
        found[name] = child
    return found


def check_linear(component: str, child: nn.Module, name: str) -> None:
    """Raise HP541 unless ``child`` is torch's own linear layer: a subclass may compute something else."""
    if type(child) is not nn.Linear:
        raise refuse(component, f"{name} of class {type(child).__name__}", expected="a torch.nn.Linear")
