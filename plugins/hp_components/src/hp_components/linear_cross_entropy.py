"""LinearCrossEntropy: the head of a language model and its loss in one module.

Legend: B batch, S sequence, T tokens (B x S), V vocab, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hp_components.axis import ONE_RANK, tensor_parallel_axis
from hp_components.bound import NATIVE, kernel
from hp_components.compiled import cross_entropy as compiled
from hp_components.source import empty_parameter, refuse, require_source, take_parameter
from hp_components.token_losses import IGNORED, Vocabulary, automatic_chunk, by_chunks, token_losses
from hp_core.applier.collectives import all_gather
from hp_core.contracts import ParallelBinding, ParallelModuleSpec
from hp_core.errors import PlanError

NAME = "linear_cross_entropy"
OPERATOR = "vocab_parallel_cross_entropy"


class LinearCrossEntropy(nn.Module):
    """Hidden states [B, S, H] -> logits [B, S, V], or per-token losses [B, S] while labels are bound.

    Built from ``module`` (an ``nn.Linear`` without bias, whose Parameter is reused) or a configuration (``vocab_size``,
    ``hidden_size``). HP541: a bias.

    - ``chunk``: tokens whose logits exist at one time; 0 chooses.
    - ``loss_parallel``: where the vocabulary is cut over tp, exchange a few numbers a token. Off, here or in the mesh: gather
      the logits, then take their cross-entropy.
    - ``checked``: labels outside the vocabulary raise HP550, which waits for an accelerator; otherwise their loss is NaN.

    Example::

        head = LinearCrossEntropy(module=nn.Linear(8, 32, bias=False))
        with head.bind_labels(torch.tensor([[3, -100]])):
            head(torch.randn(1, 2, 8))  # losses [1, 2], the second 0
    """

    parallel_spec = ParallelModuleSpec(
        protocol="hp.tensor", binding_kind="mesh", validate="hp_components.layout:check_vocabulary"
    )

    def __init__(
        self,
        *,
        config: Any = None,
        module: nn.Module | None = None,
        chunk: int = 0,
        loss_parallel: bool = True,
        checked: bool = False,
    ) -> None:
        super().__init__()
        require_source(NAME, config, module)
        if chunk < 0:
            raise PlanError("HP560", f"{NAME}: chunk is {chunk}", expected="0 (chosen) or a number of tokens")
        if module is None:
            self.weight = empty_parameter(config.vocab_size, config.hidden_size, config=config)
        else:
            self.weight = take_parameter(NAME, module, "weight", dims=2)
            if module._parameters.get("bias") is not None:
                raise refuse(NAME, "a bias", expected="a linear layer without bias")
            self.train(module.training)
        self.out_features, self.in_features = self.weight.shape
        self.chunk, self.loss_parallel, self.checked = chunk, loss_parallel, checked
        self._axis = ONE_RANK
        self._labels: Tensor | None = None

    def bind_parallel(self, binding: ParallelBinding) -> None:
        """Borrow the mesh's tp axis and its loss-parallel flag. HP551 if V does not divide by tp."""
        self._axis = tensor_parallel_axis(binding, component=NAME, vocabulary=self.out_features)
        self.loss_parallel = self.loss_parallel and binding.mesh.topology.loss_parallel

    @contextmanager
    def bind_labels(self, labels: Tensor) -> Iterator[None]:
        """Make ``forward`` return losses against ``labels`` [B, S] (shifted already, -100 ignored) inside the block only.

        HP551 if labels are bound already.
        """
        if self._labels is not None:
            raise PlanError("HP551", f"{NAME} has labels bound already", expected="one call at a time")
        self._labels = labels
        try:
            yield
        finally:
            self._labels = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (nn.Linear's callers may name it)
        """Return logits [B, S, V] of hidden states ``input`` [B, S, H]; with labels bound, losses [B, S] in at least fp32."""
        labels = self._labels
        if labels is None:
            return self._logits(input)
        self._check(input, labels)
        losses = self._losses(input.flatten(0, -2), labels.flatten())
        return losses.view(labels.shape).clone()  # not a view: FSDP2 hooks the output for its backward

    @property
    def _whole(self) -> bool:
        return bool(self.weight.shape[0] == self.out_features)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = functional.linear(hidden, self.weight)
        return logits if self._whole else all_gather(logits, dim=logits.dim() - 1, axis=self._axis, backward="split")

    def _losses(self, hidden_TH: Tensor, labels_T: Tensor) -> Tensor:
        """Return the losses [T], fused where the kernel is torch's or the compiled one, else by it on chunks of logits."""
        weight, op = self.weight, kernel(self, OPERATOR)
        cut = not self._whole
        if cut and not self.loss_parallel:
            return op(self._logits(hidden_TH), labels_T, first=0, axis=ONE_RANK)
        first, axis = (self._axis.rank * weight.shape[0], self._axis) if cut else (0, ONE_RANK)
        faster = op is compiled.vocab_parallel_cross_entropy
        if (faster or op is NATIVE[OPERATOR]) and not torch.compiler.is_compiling():
            vocabulary = Vocabulary(first=first, total=self.out_features, axis=axis)
            return token_losses(hidden_TH, weight, labels_T, vocabulary=vocabulary, chunk=self.chunk, compiled=faster)

        def losses(hidden: Tensor, labels: Tensor) -> Tensor:
            return op(functional.linear(hidden, weight), labels, first=first, axis=axis)

        return by_chunks(losses, hidden_TH, labels_T, chunk=self.chunk or automatic_chunk(hidden_TH, weight))

    def _check(self, hidden: Tensor, labels: Tensor) -> None:
        if labels.shape != hidden.shape[:-1]:
            raise PlanError(
                "HP550",
                f"labels have shape {tuple(labels.shape)}",
                expected=f"{tuple(hidden.shape[:-1])}, the shape of the hidden states",
                where=NAME,
            )
        if self.checked:
            self._check_range(labels)

    def _check_range(self, labels: Tensor) -> None:
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= self.out_features))]
        if wrong.numel():
            raise PlanError(
                "HP550", f"label {int(wrong[0])}", expected=f"0 .. {self.out_features - 1}, or {IGNORED}", where=NAME
            )

    def extra_repr(self) -> str:
        """Return the sizes, as torch prints them."""
        return f"{self.in_features}, {self.out_features}, chunk={self.chunk}, loss_parallel={self.loss_parallel}"
