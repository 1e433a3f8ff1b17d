"""The optimizer of a recipe, over whatever parameters a rank holds."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hp_trainer.sections import Train

FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


def make_optimizer(model: nn.Module, *, train: Train) -> Optimizer:
    """Return AdamW (fused where the device has it) or SGD over the trainable parameters of ``model``.

    Weight decay is for parameters of two or more dims; FSDP and tp shards keep the dims of the whole, so every mesh agrees.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = train.optimizer.weight_decay
    groups = [
        {"params": [parameter for parameter in trainable if parameter.dim() >= 2], "weight_decay": decay},
        {"params": [parameter for parameter in trainable if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer.name == "sgd":
        return SGD(groups, lr=train.optimizer.lr)
    fused = all(parameter.device.type in FUSED_DEVICES for parameter in trainable)
    return AdamW(groups, lr=train.optimizer.lr, betas=train.optimizer.betas, fused=fused)


def set_learning_rate(optimizer: Optimizer, *, lr: float) -> None:
    """Give every parameter group the learning rate ``lr``."""
    for group in optimizer.param_groups:
        group["lr"] = lr
