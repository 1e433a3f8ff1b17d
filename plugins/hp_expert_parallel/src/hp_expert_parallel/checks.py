"""What a transport is given: tensors, receipts, options. Every error says what was found and what belongs there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from hp_core.errors import PlanError
from hp_core.mesh.context import AxisGroup


def count_of_experts(name: str, options: Mapping[str, Any], *, axis: AxisGroup) -> int:
    """Return ``options["num_experts"]``; HP551 unless it is a positive integer, HP502 unless ep divides it."""
    experts = options.get("num_experts")
    if type(experts) is not int or experts < 1:
        raise PlanError("HP551", f"protocol ep:{name} gets num_experts = {experts!r}", expected="a positive integer")
    if experts % axis.size:
        raise PlanError("HP502", f"num_experts ({experts}) must be divisible by ep ({axis.size})")
    return experts


def check_hidden(hidden: Tensor, *, device: torch.device) -> None:
    """Raise HP550 unless ``hidden`` is a floating [T, H] on the mesh's kind of device."""
    if hidden.dim() != 2:
        _refuse("hidden", f"has shape {_shape(hidden)}", "[T, H]")
    if not hidden.is_floating_point():
        _refuse("hidden", f"is {_dtype(hidden)}", "a floating dtype")
    _check_device("hidden", hidden, device)


def check_choices(hidden: Tensor, indices: Tensor, weights: Tensor) -> None:
    """Raise HP550 unless ``indices`` and ``weights`` are [T, K] of integers and floats, where ``hidden`` is."""
    tokens = hidden.shape[0]
    if indices.dim() != 2 or indices.shape[0] != tokens or not indices.shape[1]:
        _refuse("expert_indices", f"has shape {_shape(indices)}", f"[{tokens}, K], a row for every row of hidden")
    if indices.dtype not in (torch.int64, torch.int32):
        _refuse("expert_indices", f"is {_dtype(indices)}", "int64 or int32")
    if weights.shape != indices.shape:
        _refuse("routing_weights", f"has shape {_shape(weights)}", f"{_shape(indices)}, that of expert_indices")
    if not weights.is_floating_point():
        _refuse("routing_weights", f"is {_dtype(weights)}", "a floating dtype")
    _check_device("expert_indices", indices, hidden.device)
    _check_device("routing_weights", weights, hidden.device)


def check_values(values: Tensor, *, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise HP550 unless ``values`` is [rows, width], in ``dtype`` or, for sums, at least fp32."""
    if values.dim() != 2 or tuple(values.shape) != (rows, width):
        _refuse("values", f"has shape {_shape(values)}", f"({rows}, {width}), the rows that were dispatched")
    wide = torch.promote_types(dtype, torch.float32)
    if values.dtype not in (dtype, wide):
        expected = " or ".join(dict.fromkeys(str(item).removeprefix("torch.") for item in (dtype, wide)))
        _refuse("values", f"is {_dtype(values)}", expected)
    _check_device("values", values, device)


def check_receipt(receipt: Any, kind: type, *, context: Any) -> None:
    """Raise HP551 unless ``receipt`` is an unused one of ``context``."""
    if not isinstance(receipt, kind):
        raise PlanError("HP551", f"receipt is a {type(receipt).__name__}", expected="what dispatch gave")
    if receipt.context is not context:  # type: ignore[attr-defined]
        raise PlanError("HP551", "receipt belongs to another context", expected="one of the context that dispatched")
    if receipt.used:  # type: ignore[attr-defined]
        raise PlanError("HP551", "receipt is used already", expected="one combine for every dispatch")


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    same_index = None in (tensor.device.index, device.index) or tensor.device.index == device.index
    if tensor.device.type != device.type or not same_index:
        _refuse(name, f"is on {tensor.device}", str(device))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _refuse(name: str, found: str, expected: str) -> NoReturn:
    raise PlanError("HP550", f"{name} {found}", expected=expected, where="expert parallel transport")
