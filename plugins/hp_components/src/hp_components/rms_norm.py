"""RMSNorm as a component. Legend: H normalised features."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hp_components.bound import epsilon, kernel
from hp_components.source import empty_parameter, refuse, require_source, take_parameter

NAME = "rms_norm"


class RMSNorm(nn.Module):
    """Hidden states [.., H] -> [.., H]: ``x / sqrt(mean(x^2) + eps) * (weight + offset)``, computed in at least fp32.

    Built from ``module`` (Hugging Face's or torch's RMSNorm, whose Parameter is reused) or a configuration (``hidden_size``,
    ``rms_norm_eps``). ``offset``: 1.0 for models that store the distance from one. HP541: a bias, no weight, no epsilon.

    Example::

        RMSNorm(module=nn.RMSNorm(8, eps=1e-6))(torch.randn(2, 8))
    """

    def __init__(self, *, config: Any = None, module: nn.Module | None = None, offset: float = 0.0) -> None:
        super().__init__()
        require_source(NAME, config, module)
        if module is None:
            self.weight = empty_parameter(config.hidden_size, config=config)
            self.eps = float(config.rms_norm_eps)
        else:
            self.weight = take_parameter(NAME, module, "weight", dims=1)
            if module._parameters.get("bias") is not None:
                raise refuse(NAME, "a bias", expected="a norm without bias")
            self.eps = _epsilon(module)
            self.train(module.training)
        self.offset = float(offset)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised hidden states, shaped and typed like the argument."""
        return self._norm(hidden_states)

    def _norm(self, x: Tensor) -> Tensor:
        found: Tensor = kernel(self, "rms_norm")(x, self.weight, eps=self.eps, offset=self.offset)
        return found

    def extra_repr(self) -> str:
        """Return the size, epsilon and offset, as torch prints them."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}, offset={self.offset}"


class RMSNormOfX(RMSNorm):
    """:class:`RMSNorm` for models that call the argument ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, shaped and typed like it."""
        return self._norm(x)


def _epsilon(module: nn.Module) -> float:
    try:
        return epsilon(module)
    except AttributeError:
        raise refuse(NAME, "no epsilon", expected="variance_epsilon, eps or epsilon") from None
