"""The module behind the family's declaration."""

from torch import nn


class Norm(nn.Module):
    """Stands for a module."""

    def __init__(self, *, module=None):
        super().__init__()
