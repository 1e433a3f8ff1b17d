"""The code behind the declarations."""

from torch import nn


class Part(nn.Module):
    """Stands for a part of a norm."""

    def __init__(self, width):
        super().__init__()


class Norm(nn.Module):
    """A norm that calls its part with a name that it does not take."""

    def __init__(self, *, module, eps=1e-6):
        super().__init__()
        self.part = Part(size=3)


class Bare(nn.Module):
    """A norm without a weight, which refuses negative values."""

    def __init__(self, *, module, eps=1e-6):
        super().__init__()
        if eps < 0:
            raise ValueError(f"eps is {eps}")

    def forward(self, hidden_states):
        return hidden_states
