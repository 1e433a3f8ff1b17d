"""The code behind the declarations."""

from torch import nn


class Norm(nn.Module):
    """Stands for a module."""

    def __init__(self, *, module=None, epsilon=1e-6):
        super().__init__()
