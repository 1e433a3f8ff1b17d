"""The code behind the declarations."""

from torch import nn


class Norm(nn.Module):
    """Stands for a module."""
