"""VocabEmbedding: ``nn.Embedding`` whose rows may be cut over tp. Legend: B batch, S sequence, V vocab, H hidden."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from hp_components.axis import ONE_RANK, tensor_parallel_axis
from hp_components.bound import kernel
from hp_components.source import empty_parameter, refuse, require_source, take_parameter
from hp_core.contracts import ParallelBinding, ParallelModuleSpec

NAME = "vocab_embedding"


class VocabEmbedding(nn.Module):
    """Token embedding: ids [B, S] -> [B, S, H], one device or one tp rank's share of the vocabulary.

    Built from ``module`` (an ``nn.Embedding``, whose Parameter is reused) or from a configuration (``vocab_size``,
    ``hidden_size``, ``pad_token_id``). While its local ``weight`` has V / tp rows the output is this rank's summand:
    ids of other ranks give zero rows. HP541: an embedding that renormalises, scales or is sparse.

    Example::

        VocabEmbedding(module=nn.Embedding(32, 8))(torch.tensor([[1, 2]])).shape  # (1, 2, 8)
    """

    parallel_spec = ParallelModuleSpec(
        protocol="hp.tensor", binding_kind="mesh", validate="hp_components.layout:check_vocabulary"
    )

    def __init__(self, *, config: Any = None, module: nn.Module | None = None) -> None:
        super().__init__()
        require_source(NAME, config, module)
        if module is None:
            self.weight = empty_parameter(config.vocab_size, config.hidden_size, config=config)
            padding: int | None = getattr(config, "pad_token_id", None)
            self.padding_idx = None if padding is None else padding % config.vocab_size  # negative: from the end
        else:
            self.weight = take_parameter(NAME, module, "weight", dims=2)
            self.padding_idx = _checked(cast(nn.Embedding, module)).padding_idx
            self.train(module.training)
        self.num_embeddings, self.embedding_dim = self.weight.shape
        self._axis = ONE_RANK

    def bind_parallel(self, binding: ParallelBinding) -> None:
        """Borrow the mesh's tp axis. HP551 if V does not divide by its size."""
        self._axis = tensor_parallel_axis(binding, component=NAME, vocabulary=self.num_embeddings)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (nn.Embedding's callers may name it)
        """Return the rows for ids ``input`` [B, S]: [B, S, H], a summand over tp where the weight is cut."""
        weight = self.weight
        found: Tensor = kernel(self, "embedding")(
            input,
            weight,
            first=self._axis.rank * weight.shape[0] if weight.shape[0] < self.num_embeddings else 0,
            total=self.num_embeddings,
            padding=self.padding_idx,
        )
        return found

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}"


def _checked(module: nn.Embedding) -> nn.Embedding:
    for option, plain in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        found = getattr(module, option, plain)
        if found != plain:
            raise refuse(NAME, f"{option}={found!r}", expected=f"{option}={plain!r}")
    return module
