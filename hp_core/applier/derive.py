"""Deriving a class from a module's class: the one way in which the applier changes what a forward does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from hp_core.models.inventory import WRAPPED

Layer = Callable[[type[nn.Module]], dict[str, Any]]  # class below -> methods of the class above it


def derive(module: nn.Module, layer: Layer) -> None:
    """Change the class of ``module`` to one derived from it with the methods of ``layer``; made once per class.

    The new class keeps name and module path, so that it prints and is looked up like the original;
    ``hp_core.models.inventory.original_class`` finds the way back.
    """
    module.__class__ = derived_class(type(module), layer)  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def derived_class(cls: type[nn.Module], layer: Layer) -> type[nn.Module]:
    """Return the class derived from ``cls`` by ``layer``, the same object for the same arguments."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, WRAPPED: cls}
    return type(cls.__name__, (cls,), {**names, **layer(cls)})
