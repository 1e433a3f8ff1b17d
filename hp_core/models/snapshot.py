"""What a model is made of at one moment, so that it can be put back: classes, attributes, children, parameters, hooks."""

from __future__ import annotations

from typing import Any

import attrs
from torch import nn


@attrs.frozen(eq=False)
class Snapshot:
    """The structure of a model; tensors are remembered by identity, not copied.

    Example::

        before = take_snapshot(model)
        model.head = nn.Identity()
        before.restore()  # model.head is what it was, in its place
    """

    _modules: tuple[tuple[nn.Module, type[nn.Module], dict[str, Any]], ...]

    def restore(self) -> None:
        """Put every module back: its class and all its attributes, in order."""
        for module, cls, attributes in self._modules:
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(_copied(attributes))


def take_snapshot(model: nn.Module) -> Snapshot:
    """Return the structure of ``model`` and everything below it."""
    return Snapshot(tuple((module, type(module), _copied(module.__dict__)) for module in model.modules()))


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy the containers of a module, which are changed in place; what they hold stays the same objects."""
    return {name: value.copy() if isinstance(value, dict | set) else value for name, value in attributes.items()}
