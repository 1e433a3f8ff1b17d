"""The reference of the equivalence check: the unmodified Hugging Face class, one process, one step, written to a folder."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.logging import disable_progress_bar

from hp_core.models.configuration import make_config
from hp_core.plugins.lazy import load
from hp_core.plugins.load import load_plugins
from hp_core.testing.cell import ModelCase
from hp_core.testing.promote import promote
from hp_core.testing.router_reference import loads, move_biases, router_objective, watch_routers
from hp_core.testing.routing import WatchRouting, narrow_routing

IGNORED = -100
LEARNING_RATE = 1.0  # plain SGD, so that the scale of every gradient shows in the parameters
_CLIP = 0.5  # of the reference's own norm, so that clipping acts
MARGIN = 1e-6  # far above what rounding in float64 can turn, and above what it can in float32
SEEDS = 50
_RESULT = "reference.pt"


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Token ids, labels (already shifted, -100 ignored), positions and, where packed, document ids, each [rows, sequence]."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Number of labels that count: the one normaliser of the loss."""
        return int((self.labels != IGNORED).sum())

    def rows(self, rows: slice | list[int]) -> Batch:
        """Return some of the rows."""
        ids = None if self.document_ids is None else self.document_ids[rows]
        tensors = (self.input_ids[rows], self.labels[rows], self.position_ids[rows])
        return Batch(**dict(zip(("input_ids", "labels", "position_ids"), tensors, strict=True)), document_ids=ids)

    def documents(self) -> Iterator[Batch]:
        """Yield every document as a batch of its own; the whole batch where none are packed."""
        if self.document_ids is None:
            yield self
            return
        tensors = {name: x for name, x in attrs.asdict(self, recurse=False).items() if name != "document_ids"}
        for row, ids in enumerate(self.document_ids):
            for document in ids.unique_consecutive():
                yield Batch(**{name: x[row, ids == document].unsqueeze(0) for name, x in tensors.items()})


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """What one step of a model does; tensors whole, by Hugging Face's runtime names, tied ones once.

    ``norm`` is the gradient norm before clipping; ``parameters`` are those after one step of SGD with clipped gradients;
    ``aliases`` maps the further names of tied parameters to their first. ``buffers``: the saved ones after the step;
    ``loads`` [E]: how often each expert was chosen, by router, where the recipe asks something of routers.
    """

    loss: float
    norm: float
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    next_loss: float
    aliases: dict[str, str]
    buffers: dict[str, Tensor] = attrs.field(factory=dict)
    loads: dict[str, Tensor] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True, eq=False)
class Reference:
    """A finished reference: its batch, its step, for every routing call the experts chosen [rows x sequence, K], its seed."""

    batch: Batch
    step: Step
    max_norm: float
    margin: float
    choices: tuple[Tensor, ...]
    seed: int

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """Return the reference that :func:`make_reference` wrote."""
        found: Reference = torch.load(folder / _RESULT, weights_only=False)
        return found


def make_reference(case: ModelCase, folder: Path, dtype: str) -> float:
    """Write the model's weights (a Hugging Face checkpoint) and what one step of it does into ``folder``.

    Seeds are tried until no expert is chosen by less than a margin of 1e-6, in the step and after it. Returns the margin; where
    it is smaller, no seed has done and nothing is written. ``dtype`` is ``float64`` (promoted) or ``float32``. Meant for a
    forked process.
    """
    disable_progress_bar()
    best = 0.0
    for seed in range(SEEDS):
        with promote() if dtype == "float64" else nullcontext():
            reference, model = _reference(case, seed=seed, dtype=dtype), random_model(case, seed=seed, dtype=dtype)
        if reference.margin > MARGIN:
            model.save_pretrained(folder)
            torch.save(reference, folder / _RESULT)
            return reference.margin
        best = max(best, reference.margin)  # one that is not a number is never the larger
    return best


def random_model(case: ModelCase, *, seed: int, dtype: str) -> Any:
    """Return the case's Hugging Face model with every parameter and saved buffer random: no ones, no zeros."""
    adapter = load_plugins().adapter(case.adapter)
    config = make_config(adapter, case.config, where=lambda _: "the cell's model")
    config.use_cache = False
    model = load(adapter.model_class)._from_config(
        config, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict().keys()
    for tensor in [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name in saved)]:
        _randomise(tensor, generator)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in case.freeze))
    return model


def make_batch(case: ModelCase, *, seed: int) -> Batch:
    """Return the case's batch; in the second half of the rows hardly any label counts."""
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    shape = (case.rows, case.sequence + 1)
    tokens = torch.randint(case.config["vocab_size"], shape, generator=generator)
    kept = torch.rand((case.rows, case.sequence), generator=generator) < 0.08
    kept[: case.rows // 2] = True
    kept[:, 0] = True
    positions = torch.arange(case.sequence).expand(case.rows, -1).contiguous()
    labels = tokens[:, 1:].masked_fill(~kept, IGNORED)
    batch = Batch(input_ids=tokens[:, :-1].contiguous(), labels=labels, position_ids=positions)
    return _packed(batch, generator) if case.packed else batch


def _packed(batch: Batch, generator: torch.Generator) -> Batch:
    """Cut the rows into documents: positions start again, and the last token of a document has no label."""
    begins = torch.rand(batch.labels.shape, generator=generator) < 5 / batch.labels.shape[1]
    begins[:, 0] = True
    first = torch.where(begins, batch.position_ids, 0).cummax(1).values
    labels = batch.labels.clone()
    labels[:, :-1][begins[:, 1:]] = IGNORED
    return Batch(
        input_ids=batch.input_ids,
        labels=labels,
        position_ids=batch.position_ids - first,
        document_ids=begins.cumsum(1),
    )


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Return every further name of a parameter that has several, with its first."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in model.named_parameters(remove_duplicate=False)}
    return {name: canonical for name, canonical in names.items() if name != canonical}


def _randomise(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill in place: a matrix so that its product keeps a vector's length, weights of norms around one, others around zero."""
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    around = 1.0 if bool((tensor == 1).all()) else 0.0
    tensor.detach().copy_(noise / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else around + 0.2 * noise)


def _reference(case: ModelCase, *, seed: int, dtype: str) -> Reference:
    model, batch = random_model(case, seed=seed, dtype=dtype), make_batch(case, seed=seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with WatchRouting() as watch, narrow_routing(case.reachable):
        loss, load = _backward(model, batch, case)
    choices = tuple(watch.choices)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    max_norm = _CLIP * float(torch.nn.utils.get_total_norm([p.grad for p in trained]))
    norm = float(torch.nn.utils.clip_grad_norm_(trained, max_norm))
    torch.optim.SGD(trained, lr=LEARNING_RATE).step()
    with torch.no_grad(), watch, narrow_routing(case.reachable):
        _balance(model, load, case)
        next_loss = float(_loss(model, batch))
    saved = model.state_dict().keys()
    step = Step(
        loss=loss,
        norm=norm,
        gradients=gradients,
        parameters={name: parameter.detach() for name, parameter in model.named_parameters()},
        next_loss=next_loss,
        aliases=aliases_of(model),
        buffers={name: buffer for name, buffer in model.named_buffers() if name in saved},
        loads=load,
    )
    return Reference(batch=batch, step=step, max_norm=max_norm, margin=watch.margin, choices=choices, seed=seed)


def _backward(model: nn.Module, batch: Batch, case: ModelCase) -> tuple[float, dict[str, Tensor]]:
    """Run the step forward and backward; return its loss, and the routers' loads where something is asked of them.

    Router losses depend on micro-batches, so the step then runs in the case's parts.
    """
    if not case.routers:
        loss = _loss(model, batch)
        loss.backward()
        return float(loss.detach()), {}
    adapter, total, load = load_plugins().adapter(case.adapter), 0.0, dict[str, Tensor]()
    assert adapter.router is not None
    for rows in case.parts:
        part = batch.rows(list(rows))
        with watch_routers(model, adapter) as routed:
            loss = _loss(model, part) * (part.tokens / batch.tokens)
        asked = router_objective(routed, case.routers, rows=len(rows), scoring=adapter.router.scoring)
        (loss + asked * (part.tokens / batch.tokens)).backward()
        total += float(loss.detach())
        load = {fqn: counts + load.get(fqn, torch.zeros_like(counts)) for fqn, counts in loads(routed).items()}
    return total, load


def _balance(model: nn.Module, load: dict[str, Tensor], case: ModelCase) -> None:
    router, rate = load_plugins().adapter(case.adapter).router, case.routers.get("bias_update_rate")
    if rate:
        assert router is not None
        assert router.bias is not None
        move_biases(model, load, bias=router.bias, rate=rate)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    total = torch.zeros(())
    for part in batch.documents():
        logits = model(input_ids=part.input_ids, position_ids=part.position_ids).logits
        total = total + functional.cross_entropy(logits.float().flatten(0, 1), part.labels.flatten(), reduction="sum")
    return total / batch.tokens
