"""How many elements leave the ranks, forward and backward, against the formulas of docs/explanation/context-parallelism.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context_cases import LAYOUTS, Asked, B, C, D, K, N, Way, grouped, latent, run, sequence_dims

from hp_context_parallel import traffic
from hp_core.mesh.shared_memory import SharedMemory
from hp_core.mesh.topology import Topology
from hp_core.testing.ranks import run_ranks

pytestmark = pytest.mark.distributed
S = 48
KV = 2 * B * K * D  # elements of keys and values of a token
LATENT = B * (C + 2)


class Traffic:
    """Counts what leaves this rank: what a collective keeps for the rank itself does not travel."""

    def __init__(self) -> None:
        self.elements = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within the block."""
        names = ("all_to_all_single", "all_gather_single", "P2POp")
        with mock.patch.multiple(dist, **{name: getattr(self, name)(getattr(dist, name)) for name in names}):
            yield

    def all_to_all_single(self, original: Any) -> Any:
        def call(out: Any, sent: Any, arriving: Any = None, leaving: Any = None, **options: Any) -> Any:
            size = dist.get_world_size(options["group"])
            rows = sent.numel() // max(1, sent.shape[0])
            self.elements += sent.numel() * (size - 1) // size if leaving is None else sum(leaving) * rows
            return original(out, sent, arriving, leaving, **options)

        return call

    def all_gather_single(self, original: Any) -> Any:
        def call(out: Any, sent: Any, **options: Any) -> Any:
            self.elements += sent.numel() * (dist.get_world_size(options["group"]) - 1)
            return original(out, sent, **options)

        return call

    def P2POp(self, original: Any) -> Any:
        def make(op: Any, tensor: Any, **options: Any) -> Any:
            self.elements += tensor.numel() if op is dist.isend else 0
            return original(op, tensor, **options)

        return make


def over_sockets(way: Way) -> Any:
    """Return a context whose ranks share no memory: what goes through sockets can be watched."""
    with mock.patch.object(SharedMemory, "open", return_value=None):
        return way.context()


def sent(way: Way, asked: Asked, kind: str) -> tuple[int, int]:
    """Return how many elements leave this rank in the forward, and in the backward."""
    context, rank, found = over_sockets(way), dist.get_rank(), []
    tensors = grouped(S) if kind == "grouped" else latent(S)
    dims = sequence_dims(tensors)
    parts = [t.clone() if dim is None else way.local(t, rank=rank, dim=dim) for t, dim in zip(tensors, dims, strict=True)]
    ids = asked.ids(S)
    local = None if ids is None else way.local(ids, rank=rank, dim=1)
    leaves, traffic = [part.requires_grad_() for part in parts], Traffic()
    with traffic.counting():
        out = run(context, leaves, asked, local)
        found.append(traffic.elements)
        out.sum().backward()
    return found[0], traffic.elements - found[0]


def total(way: Way, *, asked: Asked | None = None, kind: str = "grouped") -> tuple[int, int]:
    """Return the sums over all ranks."""
    forward, backward = zip(*run_ranks(way.cp, sent, way, asked or Asked(), kind), strict=True)
    return sum(forward), sum(backward)


@pytest.mark.parametrize("cp", [2, 4])
def test_allgather_sends_what_is_seen_and_gets_its_gradients_back(cp: int) -> None:
    zigzag, contiguous = Way(name="allgather", cp=cp), Way(name="allgather", cp=cp, layout="contiguous")
    assert total(zigzag) == (3 * (cp - 1) * S * KV // 4,) * 2
    assert total(contiguous) == ((cp - 1) * S * KV // 2,) * 2
    assert total(zigzag, kind="latent") == (3 * (cp - 1) * S * LATENT // 4,) * 2


def test_a_window_is_all_that_allgather_sends() -> None:
    assert total(Way(name="allgather", cp=4, layout="contiguous"), asked=Asked(window=5)) == (3 * 4 * KV,) * 2


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_sends_every_block_once_round_and_again_with_its_gradient(cp: int) -> None:
    assert total(Way(name="ring", cp=cp)) == ((cp - 1) * S * KV, 2 * (cp - 1) * S * KV)
    assert total(Way(name="ring", cp=cp), kind="latent") == ((cp - 1) * S * LATENT, 2 * (cp - 1) * S * LATENT)


@pytest.mark.parametrize("cp", [2, 4])
def test_ulysses_exchanges_heads_there_and_back(cp: int) -> None:
    heads = 2 * N + 2 * max(K, cp)
    assert total(Way(name="ulysses", cp=cp)) == ((cp - 1) * S * B * D * heads // cp,) * 2


def test_ulysses_gathers_latents() -> None:
    queries_and_outputs = S * B * (N * (D + 2) + N * D) // 2
    assert total(Way(name="ulysses", cp=2), kind="latent") == (queries_and_outputs + S * LATENT,) * 2


def test_hybrid_is_ulysses_inside_and_a_ring_of_fewer_heads_outside() -> None:
    inside = S * B * D * (2 * N + 2 * K) // 2
    assert total(Way(name="hybrid", cp=4, inner=2)) == (inside + S * KV, inside + 2 * S * KV)
    gathered = 3 * S * KV // 4
    assert total(Way(name="hybrid", cp=4, inner=2, outer="allgather")) == (inside + gathered, inside + gathered)


def test_packed_documents_cost_their_ids_once() -> None:
    way, asked = Way(name="ring", cp=2), Asked(starts=((0, 20), (0, 5)))
    assert total(way, asked=asked)[0] == total(way)[0] + B * S


CONFIGS = {
    "grouped": {"num_attention_heads": N, "num_key_value_heads": K, "head_dim": D},
    "latent": {
        "num_attention_heads": N,
        "kv_lora_rank": C,
        "qk_nope_head_dim": D,
        "qk_rope_head_dim": 2,
        "v_head_dim": D,
        "hidden_size": N * D,
    },
}
WAYS = [
    Way(name="allgather", cp=4),
    Way(name="allgather", cp=4, layout="contiguous"),
    Way(name="ring", cp=4),
    Way(name="ulysses", cp=2),
    Way(name="hybrid", cp=4, inner=2),
    Way(name="hybrid", cp=4, inner=2, outer="allgather"),
]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_a_plan_says_of_a_protocol_is_what_it_sends(way: Way, kind: str) -> None:
    options = {"sequence_layout": way.layout or LAYOUTS[way.name], "outer": way.outer}
    options["sub_axes"] = {"cp_outer": way.cp // way.inner, "cp_inner": way.inner}
    told = getattr(traffic, way.name)(options, CONFIGS[kind], Topology(cp=way.cp), (B, S))
    assert (told.forward * way.cp, told.backward * way.cp) == total(way, kind=kind)


def repeated(way: Way) -> int:
    """Return what a second layer of the same step sends for its documents."""
    context, traffic = over_sockets(way), Traffic()
    ids = torch.zeros(B, S // way.cp, dtype=torch.int64)
    context.documents.of(ids)
    with traffic.counting():
        context.documents.of(ids)
        again = traffic.elements
        ids += 1
        context.documents.of(ids)
    return again if traffic.elements else -1


def test_all_layers_of_a_step_share_the_documents_and_changed_ids_are_read_again() -> None:
    assert run_ranks(2, repeated, Way(name="ring", cp=2)) == [0, 0]
