#!/usr/bin/env python
"""Components against Hugging Face's, forward and backward on CPU.

Medians of interleaved calls, one process per part, dtype and thread count.

    python benchmarks/components.py                     # every component; fp32 and bf16; 1 and 2 threads
    python benchmarks/components.py --only experts --threads 1 --dtype float32

Every call of the experts gets other row counts, as routing does. The ratio is Hugging Face's best time over ours.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from planned_kernels import as_planned
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hp_trainer.variables import set_defaults

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCAB = 2048, 256, 128, 16, 4, 4096
Call = Callable[[], None]


def medians(calls: dict[str, Call], *, repeats: int, prepare: Call) -> dict[str, float]:
    """Return the median seconds of each call; they alternate, after two rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 2):
        prepare()
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_ > 1:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def experts(dtype: torch.dtype, *, repeats: int) -> dict[str, float]:
    """Return seconds per forward and backward of one layer of experts, by implementation."""
    from hp_components.grouped_experts import GroupedExperts

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    modules: dict[str, nn.Module] = {}
    for name in ("eager", "grouped_mm"):
        config._experts_implementation = name
        modules[f"hf {name}"] = Qwen3MoeExperts(copy.deepcopy(config)).to(dtype)
    for parameter in modules["hf eager"].parameters():
        nn.init.normal_(parameter, std=0.05)
    experts_of = GroupedExperts(module=modules["hf eager"], config=config)
    modules["hp"] = as_planned(experts_of, compute=str(dtype).removeprefix("torch."), sequence=TOKENS)
    batch: dict[str, Tensor] = {}

    def prepare() -> None:
        scores = torch.randn(TOKENS, EXPERTS) + torch.randn(EXPERTS) * 0.3
        weights, batch["index"] = scores.softmax(-1).topk(TOP_K, -1)
        batch["weights"] = weights.to(dtype)
        batch["hidden"] = torch.randn(TOKENS, HIDDEN, dtype=dtype)
        batch["grad"] = torch.randn(TOKENS, HIDDEN, dtype=dtype)

    def call(module: nn.Module) -> Call:
        def step() -> None:
            hidden, weights = batch["hidden"].requires_grad_(), batch["weights"].requires_grad_()
            output = module(hidden, batch["index"], weights)
            torch.autograd.grad(output, (hidden, weights, *module.parameters()), batch["grad"])

        return step

    calls = {name: call(module) for name, module in modules.items()}
    if dtype == torch.float32:
        calls["hp onednn"] = through_onednn(call(modules["hp"]))
    return medians(calls, repeats=repeats, prepare=prepare)


def through_onednn(call: Call) -> Call:
    """Return ``call`` under the setting that ``precision.cpu_matmul: auto`` makes where oneDNN is exact and faster."""

    def step() -> None:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
        try:
            call()
        finally:
            torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]

    return step


def head(dtype: torch.dtype, *, repeats: int) -> dict[str, float]:
    """Return seconds per forward and backward of the head with its loss."""
    from hp_components.linear_cross_entropy import LinearCrossEntropy

    linear = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=dtype)
    fused = as_planned(LinearCrossEntropy(module=linear), compute=str(dtype).removeprefix("torch."), sequence=TOKENS)
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCAB, (1, TOKENS))

    def plain() -> None:
        loss = functional.cross_entropy(linear(hidden).float().view(-1, VOCAB), labels.view(-1))
        torch.autograd.grad(loss, (hidden, linear.weight))

    def ours(chunk: int, *, uneven: bool = False) -> Call:
        factors = torch.rand(1, TOKENS) if uneven else torch.ones(1)

        def step() -> None:
            fused.chunk = chunk
            with fused.bind_labels(labels):
                losses = fused(hidden)
            loss = (losses * factors).sum() if uneven else losses.sum() / TOKENS
            torch.autograd.grad(loss, (hidden, linear.weight))

        return step

    calls = {"hf": plain, "hp": ours(0), "hp uneven": ours(0, uneven=True)}
    calls |= {f"hp chunk {chunk}": ours(chunk) for chunk in (256, 512, 1024, 2048)}
    return medians(calls, repeats=repeats, prepare=lambda: None)


def embedding(dtype: torch.dtype, *, repeats: int) -> dict[str, float]:
    """Return seconds per lookup and gradient."""
    from hp_components.vocab_embedding import VocabEmbedding

    plain = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
    modules = {
        "hf": plain,
        "hp": as_planned(VocabEmbedding(module=plain), compute=str(dtype).removeprefix("torch."), sequence=TOKENS),
    }
    ids = torch.randint(VOCAB, (1, TOKENS))
    grad = torch.randn(1, TOKENS, HIDDEN, dtype=dtype)

    def call(module: nn.Module) -> Call:
        def step() -> None:
            torch.autograd.grad(module(ids), plain.weight, grad)

        return step

    return medians({name: call(module) for name, module in modules.items()}, repeats=repeats, prepare=lambda: None)


def block(name: str) -> Callable[..., dict[str, float]]:
    """Return the part that measures a block of :mod:`component_blocks`."""

    def measure_block(dtype: torch.dtype, *, repeats: int) -> dict[str, float]:
        from component_blocks import BLOCKS

        return medians(BLOCKS[name](dtype), repeats=repeats, prepare=lambda: None)

    return measure_block


NAMES = ("norm", "mlp", "router", "sigmoid_router", "gqa", "mla")
PARTS = {"experts": experts, "head": head, "embedding": embedding, **{name: block(name) for name in NAMES}}


def measure(part: str, *, threads: int, dtype: str, repeats: int) -> None:
    """Print one table: milliseconds per implementation and the ratio of Hugging Face's best to ours."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    seconds = PARTS[part](getattr(torch, dtype), repeats=repeats)
    best = min(value for name, value in seconds.items() if name.startswith("hf"))
    cells = "  ".join(f"{name} {value * 1e3:.1f}" for name, value in seconds.items())
    print(
        f"{part:14s} {dtype:8s} threads={threads}  ms: {cells}  | {best / seconds['hp']:.2f}x of Hugging Face's best",
        flush=True,
    )


def main() -> None:
    """Measure each cell in a fresh process, since variants share a process's primitive cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--repeats", type=int, default=7)
    asked = parser.parse_args()
    cells = [
        (part, dtype, threads)
        for part in asked.only or PARTS
        for dtype in asked.dtype or ("float32", "bfloat16")
        for threads in asked.threads or (1, 2)
    ]
    if len(cells) == 1:
        return measure(cells[0][0], dtype=cells[0][1], threads=cells[0][2], repeats=asked.repeats)
    set_defaults(device="cpu")  # of the processes started below: as the trainer's launcher does
    for part, dtype, threads in cells:
        command = [sys.executable, __file__, "--only", part, "--dtype", dtype, "--threads", str(threads)]
        subprocess.run([*command, "--repeats", str(asked.repeats)], check=True)
    return None


if __name__ == "__main__":
    main()
