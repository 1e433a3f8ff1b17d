"""torch_npu's operators behind its own schemas, in plain torch on the CPU, as strict as its documentation.

torch's dispatcher checks every call against the schema: names, order, types, defaults. What torch_npu differentiates itself is
differentiable here; the fused attention, its gradient and the grouped product are not, so a kernel has to do it. What the
documentation does not promise is NaN here: statistics of rows without keys, weight gradients of empty groups.

Legend: N query heads, K key-value heads, Q queries, S keys, D features, T tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_npu_wheel import stored

Calls = list[tuple[str, dict[str, Any]]]
CALLS: Calls = []
WIDE = 2147483647
FLOATING = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = 8  # of the softmax statistics, all equal
UPPER = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
COMPARED: set[int] = set()


def rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert self.dim() >= 2
    assert self.dtype == gamma.dtype
    assert self.dtype in FLOATING
    wide = self.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(self.dtype), rstd.detach()


def swiglu(self: Tensor, dim: int = -1) -> Tensor:
    assert self.dtype in FLOATING
    gate, up = self.float().chunk(2, dim)
    return (functional.silu(gate) * up).to(self.dtype)


def rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    batch, heads, _, width = self.shape
    assert rotary_mode == "half"
    assert rotate is None
    assert r1.shape == r2.shape
    assert r1.shape[-1] == width
    assert r1.shape[0] in (1, batch)
    assert r1.shape[1] in (1, heads)
    assert width < 896
    assert width % 2 == 0
    assert self.dtype == r1.dtype == r2.dtype
    first, second = self.chunk(2, -1)
    return self * r1 + torch.cat((-second, first), -1) * r2


def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    assert tokens.dim() == indices.dim() == 2
    assert tokens.dtype in FLOATING
    assert num_out_tokens in (None, 0)
    assert not padded_mode
    order = indices.flatten().argsort(stable=True)
    return tokens[order // indices.shape[1]], order.argsort().int()


def moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    assert sorted_indices.dim() == 1
    assert sorted_indices.dtype == torch.int32
    assert not padded_mode
    assert restore_shape is None
    rows = permuted_tokens.float()[sorted_indices.long()]
    if probs is None:
        return rows.to(permuted_tokens.dtype)
    assert probs.dtype in FLOATING
    summed = (rows.unflatten(0, probs.shape) * probs.float().unsqueeze(-1)).sum(1)
    return summed.to(permuted_tokens.dtype)


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
) -> list[Tensor]:
    (rows,), (matrix,) = x, weight
    assert group_list is not None
    assert group_list.dtype == torch.int64
    assert group_list_type == 0
    assert split_item in (2, 3)
    assert rows.dtype == matrix.dtype
    assert rows.dtype in FLOATING
    ends = group_list.tolist()
    spans = list(zip([0, *ends], ends, strict=False))
    assert all(start <= end for start, end in spans)
    if group_type == 0:
        assert ends[-1] == rows.shape[0]
        parts = [rows[start:end].float() @ w.float() for (start, end), w in zip(spans, matrix, strict=True)]
        return [torch.cat(parts).to(rows.dtype)]
    assert group_type == 2
    assert rows.stride(0) == 1  # a transposed view of [R, D]
    assert ends[-1] == rows.shape[1] == matrix.shape[0]
    parts = [rows[:, start:end].float() @ matrix[start:end].float() for start, end in spans]
    filled = [part if start < end else part.fill_(torch.nan) for part, (start, end) in zip(parts, spans, strict=True)]
    return [torch.stack(filled).to(rows.dtype)]


class Sequences:
    """The sequences of one call: each query, key and value as [N, Q, D], and what a query sees."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, options: dict[str, Any]) -> None:
        assert layout in ("BNSD", "TND")
        assert query.dtype == key.dtype == value.dtype
        assert query.dtype in FLOATING
        assert query.shape[-1] == key.shape[-1] >= value.shape[-1]
        assert key.shape[:-1] == value.shape[:-1]
        assert query.shape[-1] <= 768
        assert heads == query.shape[1] <= 256
        assert heads % key.shape[1] == 0
        self.packed, self.options, self.group = layout == "TND", options, heads // key.shape[1]
        self.ends = [options.get(name) for name in ("actual_seq_qlen", "actual_seq_kvlen")]
        if self.packed:
            for ends, tensor in zip(self.ends, (query, key), strict=True):
                assert all(a < b for a, b in zip([0, *ends], ends, strict=False))
                assert ends[-1] == tensor.shape[0]
                assert len(ends) <= 1024
        else:
            assert self.ends == [None, None]

    def split(self, tensor: Tensor, *, keys: bool = False) -> list[Tensor]:
        """Return the tensor of every sequence, heads first; of keys and values one head for every query head."""
        if self.packed:
            ends = self.ends[keys]
            found = [tensor[a:b].transpose(0, 1) for a, b in zip([0, *ends], ends, strict=False)]
        else:
            found = list(tensor)
        return [part.float().repeat_interleave(self.group, 0) if keys else part.float() for part in found]

    def join(self, parts: list[Tensor], *, keys: bool = False) -> Tensor:
        """Return one tensor again; of keys and values the sum of each group of heads."""
        parts = [part.unflatten(0, (-1, self.group)).sum(1) for part in parts] if keys else parts
        return torch.cat([part.transpose(0, 1) for part in parts]) if self.packed else torch.stack(parts)

    def seen(self, index: int, queries: int, keys: int) -> Tensor:
        """Return [1, Q, S]."""
        mask, mode = self.options.get("atten_mask"), self.options.get("sparse_mode", 0)
        back, ahead = self.options.get("pre_tockens", WIDE), self.options.get("next_tockens", WIDE)
        if mask is None:
            return torch.ones(1, queries, keys, dtype=torch.bool)
        assert mask.dtype == torch.bool
        distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1)
        if mode == 0:
            assert mask.shape[1:] == (1, queries, keys)
            explicit = mask[index if mask.shape[0] > 1 else 0]
            return ~explicit & (distance >= -back) & (distance <= ahead)
        assert mask.data_ptr() in COMPARED or torch.equal(mask, UPPER)
        COMPARED.add(mask.data_ptr())  # the one that is kept
        if mode == 2:
            return (distance <= 0).unsqueeze(0)
        distance = distance - (keys - queries)
        if mode == 3:
            return (distance <= 0).unsqueeze(0)
        assert mode == 4
        return ((distance >= -back) & (distance <= ahead)).unsqueeze(0)

    def kept(self, index: int, like: Tensor, seed: int) -> Tensor:
        """Return what dropout multiplies the probabilities by."""
        keep = self.options.get("keep_prob", 1.0)
        drawn = torch.rand(like.shape, generator=torch.Generator().manual_seed(seed + index))
        return (drawn < keep).float() / keep

    def statistics(self, tensor: Tensor) -> Tensor:
        """Return statistics as they lie in memory, or from there: packed ones heads first, unless asked otherwise."""
        if not self.packed or self.options.get("softmax_layout") == "TND":
            return tensor
        tokens, heads, columns = tensor.shape
        return tensor.transpose(0, 1).reshape(tokens, heads, columns)


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, scale: float = 1.0, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    lots = Sequences(query, key, value, head_num, input_layout, options)
    seed = int(torch.randint(2**20, ()))
    outs, largest, totals = [], [], []
    triples = zip(lots.split(query), lots.split(key, keys=True), lots.split(value, keys=True), strict=True)
    for index, (q, k, v) in enumerate(triples):
        seen = lots.seen(index, q.shape[1], k.shape[1])
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp()
        total = weights.sum(-1, keepdim=True)
        outs.append(weights / total * lots.kept(index, weights, seed) @ v)
        largest.append(top.expand(-1, -1, COLUMNS))
        totals.append(total.expand(-1, -1, COLUMNS))
    if options.get("inner_precise", 0) != 2:
        assert not any(total.isnan().any() for total in totals), "rows without keys"
    statistics = [lots.statistics(lots.join(parts)) for parts in (largest, totals)]
    return (lots.join(outs).to(query.dtype), *statistics, query.new_empty(0), seed, 8, query.numel())


def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    scale_value: float = 1.0,
    **options: Any,
) -> tuple[Tensor, ...]:
    lots = Sequences(query, key, value, head_num, input_layout, options)
    assert (options["offset"], options["numels"] % query.shape[0]) == (8, 0)
    tensors = (query, dy, options["attention_in"], *(lots_in(lots, options[name]) for name in ("softmax_max", "softmax_sum")))
    assert all(tensor.dtype == query.dtype for tensor in tensors[:3])
    found: list[list[Tensor]] = [[], [], []]
    rows = zip(*(lots.split(tensor) for tensor in tensors), *(lots.split(t, keys=True) for t in (key, value)), strict=True)
    for index, (q, grad, out, top, total, k, v) in enumerate(rows):
        scores = q @ k.transpose(1, 2) * scale_value
        seen = lots.seen(index, q.shape[1], k.shape[1])
        weights = (scores - top[..., :1]).exp() / total[..., :1] * seen
        weights = weights.masked_fill(~seen.any(-1, keepdim=True), 1 / k.shape[1])  # not promised to be nothing
        kept = lots.kept(index, weights, options["seed"])
        inner = weights * (grad @ v.transpose(1, 2) * kept - (grad * out).sum(-1, keepdim=True)) * scale_value
        results = (inner @ k, inner.transpose(1, 2) @ q, (weights * kept).transpose(1, 2) @ grad)
        for parts, part in zip(found, results, strict=True):
            parts.append(part)
    joined = (lots.join(parts, keys=place > 0).to(query.dtype) for place, parts in enumerate(found))
    return (*joined, query.new_empty(0), query.new_empty(0))


def lots_in(lots: Sequences, statistics: Tensor) -> Tensor:
    """Return statistics token by token."""
    if not lots.packed or lots.options.get("softmax_layout") == "TND":
        return statistics
    tokens, heads, columns = statistics.shape
    return statistics.reshape(heads, tokens, columns).transpose(0, 1)


DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "npu_moe_token_permute": moe_token_permute,
    "npu_moe_token_unpermute": moe_token_unpermute,
    "npu_rms_norm": rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_swiglu": swiglu,
}
PLAIN: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_grad": fusion_attention_grad,
    "npu_grouped_matmul": grouped_matmul,
}


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Define the namespace ``npu`` by torch_npu's schemas for as long as the context lasts."""
    library = torch.library.Library("npu", "DEF")
    for schema in stored().values():
        library.define(schema)
    for table, key in ((DIFFERENTIABLE, "CompositeImplicitAutograd"), (PLAIN, "CPU")):
        for name, function in table.items():
            library.impl(name, recorded(name, function), key)
    try:
        yield
    finally:
        library._destroy()


def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, each call of which is written down with its arguments by name."""
    signature = inspect.signature(function)
    arguments = stored()[name].partition("(")[2].partition(") ->")[0].split(", ")
    names = [argument.split("=")[0].split()[-1] for argument in arguments if argument != "*"]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        CALLS.append((name, given))
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
            return function(**given)
        unsupported = {key: value for key, value in given.items() if key not in signature.parameters}
        assert all(value in (None, 0) for value in unsupported.values()), unsupported
        return function(**{key: value for key, value in given.items() if key in signature.parameters})

    return call
