"""Holding one step against another: the worst difference of every quantity, in units of what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import Tensor

from hp_core.testing.cell import Deviation
from hp_core.testing.reference import Step

_SMALL = 1024  # tensors with fewer elements are pooled by kind: their own error is chance


@attrs.frozen(kw_only=True)
class Tolerance:
    """``relative`` to a tensor's largest element, with a ``floor`` relative to the model's largest gradient."""

    relative: float
    floor: float


EXACT = Tolerance(relative=1e-9, floor=1e-12)
FAST = Tolerance(relative=1e-5, floor=1e-8)


def deviations(found: Step, expected: Step, *, tolerance: Tolerance) -> tuple[Deviation, ...]:
    """Return the worst deviation of loss, gradient norm, gradients, parameters and buffers after the step, loads, next loss."""
    scalars = [
        _scalar("loss", found.loss, expected.loss, tolerance),
        _scalar("gradient norm", found.norm, expected.norm, tolerance),
        _scalar("next loss", found.next_loss, expected.next_loss, tolerance),
    ]
    gradients = _worst("gradient", _present(found.gradients), _present(expected.gradients), tolerance)
    parameters = _worst("parameter", found.parameters, expected.parameters, tolerance)
    buffers = _worst("buffer", found.buffers, expected.buffers, tolerance)
    return (*scalars, *gradients, *parameters, *buffers, *_worst("load", found.loads, expected.loads, tolerance))


def disagreements(found: Step, expected: Step) -> tuple[str, ...]:
    """Return what has no size: names, shapes, which gradients exist, which parameters are tied."""
    return (
        *_names("parameters", set(found.parameters), set(expected.parameters)),
        *_names("gradients", set(_present(found.gradients)), set(_present(expected.gradients))),
        *_names("saved buffers", set(found.buffers), set(expected.buffers)),
        *_names("router loads", set(found.loads), set(expected.loads)),
        *_names("tied names", set(found.aliases.items()), set(expected.aliases.items())),
        *(
            f"{name} has shape {tuple(found.parameters[name].shape)}, the reference {tuple(tensor.shape)}"
            for name, tensor in expected.parameters.items()
            if name in found.parameters and found.parameters[name].shape != tensor.shape
        ),
    )


def rms_errors(found: Step, exact: Step) -> dict[str, float]:
    """Return the root mean square error of each gradient, tensors under 1,024 elements pooled by kind."""
    return {name: (squares / count) ** 0.5 for name, (squares, count) in _pools(found, exact).items()}


def low_precision(found: Step, exact: Step, baseline: Mapping[str, float], *, factor: float = 1.5) -> tuple[Deviation, ...]:
    """Return the worst gradient error in units of ``factor`` times the error of one process in the same precision.

    A kind that has fewer than 1,024 elements in all layers together is too small for a ratio of its own: such kinds are
    held together, by the root mean square of their ratios.
    """
    pools = _pools(found, exact)
    errors = {name: (squares / count) ** 0.5 for name, (squares, count) in pools.items()}
    few = [name for name, (_, count) in pools.items() if count < _SMALL]
    compared = [
        Deviation(quantity="gradient rms", name=name, error=error, allowed=factor * baseline[name])
        for name, error in errors.items()
        if name not in few
    ]
    if few:
        ratio = (sum((errors[name] / baseline[name]) ** 2 for name in few) / len(few)) ** 0.5
        compared.append(Deviation(quantity="gradient rms ratio", name=", ".join(few), error=ratio, allowed=factor))
    loss = Deviation(quantity="loss", name="", error=abs(found.loss - exact.loss), allowed=2.0**-7 * abs(exact.loss))
    return (loss, max(compared, key=lambda item: item.severity))


def kind(name: str) -> str:
    """Return a parameter's name without the index of its layer: what is pooled together."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _present(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _scalar(quantity: str, found: float, expected: float, tolerance: Tolerance) -> Deviation:
    return Deviation(quantity=quantity, name="", error=abs(found - expected), allowed=tolerance.relative * abs(expected))


def _worst(
    quantity: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance
) -> Iterator[Deviation]:
    """Yield the worst tensor's deviation; nothing if no tensor can be compared."""
    largest = max((_size(tensor) for tensor in expected.values()), default=0.0)
    compared = [
        Deviation(
            quantity=quantity,
            name=name,
            error=_size(found[name].double() - tensor.double()),
            allowed=max(tolerance.relative * _size(tensor), tolerance.floor * largest),
        )
        for name, tensor in expected.items()
        if name in found and found[name].shape == tensor.shape
    ]
    if compared:
        yield max(compared, key=lambda item: item.severity)


def _size(tensor: Tensor) -> float:
    """Return the largest absolute element; not-a-number stays so."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _names(what: str, found: set[object], expected: set[object]) -> Iterator[str]:
    if missing := expected - found:
        yield f"{what} missing: {', '.join(sorted(map(str, missing)))}"
    if surplus := found - expected:
        yield f"{what} that the reference lacks: {', '.join(sorted(map(str, surplus)))}"


def _pools(found: Step, exact: Step) -> dict[str, tuple[float, int]]:
    pools: dict[str, tuple[float, int]] = {}
    for name, expected in _present(exact.gradients).items():
        gradient = found.gradients[name]
        assert gradient is not None, name
        key = name if expected.numel() >= _SMALL else kind(name)
        squares, count = pools.get(key, (0.0, 0))
        error = torch.sum((gradient.double() - expected.double()) ** 2)
        pools[key] = (squares + float(error), count + expected.numel())
    return pools
