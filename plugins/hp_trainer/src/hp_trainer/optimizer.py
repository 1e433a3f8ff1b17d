"""The optimizer of a recipe, over whatever parameters a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from hp_trainer.sections import Train

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


def make_optimizer(model: nn.Module, *, train: Train) -> Optimizer:
    """Return AdamW (fused where the device has it) or SGD over the trainable parameters of ``model``.

    Weight decay is for parameters of two or more dims; FSDP and tp shards keep the dims of the whole, so every mesh agrees.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(trainable, weight_decay=train.optimizer.weight_decay)
    if train.optimizer.name == "sgd":
        return SGD(groups, lr=train.optimizer.lr)
    fused = all(parameter.device.type in FUSED_DEVICES for parameter in trainable)
    return AdamW(groups, lr=train.optimizer.lr, betas=train.optimizer.betas, fused=fused)


def parameter_groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of an optimizer: decayed or not, and DTensors apart from plain tensors.

    The fused and the foreach optimizers make one operator call of each group, and such a call takes DTensors or plain
    tensors but not both.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    return [{"params": members, "weight_decay": weight_decay if decay else 0.0} for (decay, _), members in groups.items()]


def set_learning_rate(optimizer: Optimizer, *, lr: float) -> None:
    """Give every parameter group the learning rate ``lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr
