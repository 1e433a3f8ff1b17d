#!/usr/bin/env python3
"""A small MoE on one accelerator in bf16: ours, Hugging Face (SDPA, grouped experts), torchtitan's blocks if installed.

    python benchmarks/device_check.py                   # one GPU, under 5 minutes; a markdown table
    python benchmarks/device_check.py --device cpu      # the same code with a tiny model, without a GPU

Gradients are compared first, ours with Hugging Face's on the device, in fp32, with a small model. Then every row runs in
processes of its own, round after round: steps are timed between synchronisations, after warm-up; memory is the allocator's
peak. Our step clips gradients, the others do not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ranks import become_ranks

LARGE = {
    "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
}  # fmt: skip
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
NAMES = {"hp": "HP", "hf": "Hugging Face", "titan": "torchtitan's blocks"}
LIMIT_S, TOLERANCE = 120, 1e-4  # of a row; of gradients in fp32, whose products a GPU adds in other orders than a CPU


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--row", choices=NAMES, help="run this row only, once, and print one line JSON {...}")
    return parser.parse_args()


def timed_workload(device: str) -> Any:
    """Return the model and batch that are timed: large enough to keep a GPU busy, tiny without one."""
    from workload import Workload

    tokens, sequence, sizes = (128, 64, SMALL) if device == "cpu" else (8192, 2048, LARGE)
    return Workload(dtype="bf16", tokens=tokens, sequence=sequence, config=sizes)


def run_row(args: argparse.Namespace) -> None:
    """Time one row and print its line."""
    import torch

    step = subject(args.row, timed_workload(args.device), device=args.device).step
    seconds, losses = [], []
    for _ in range(args.warmup + args.steps):
        synchronise(args.device)
        begin = time.perf_counter()
        losses.append(step())
        synchronise(args.device)
        seconds.append(time.perf_counter() - begin)
    peak = (
        torch.cuda.max_memory_allocated()
        if args.device == "cuda"
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    print(
        "JSON " + json.dumps({"seconds": seconds[args.warmup :], "peak_gb": peak / 1e9, "losses": [losses[0], losses[-1]]}),
        flush=True,
    )


def subject(name: str, workload: Any, *, device: str) -> Any:
    """Return the row's model, with its optimizer."""
    from subjects import HuggingFace, Planned

    from hp_core.mesh.topology import Topology

    if name == "titan":
        from titan_blocks import Titan

        return Titan(workload, device=device)
    if name == "hf":
        return HuggingFace(workload, device=device)
    return Planned(workload, Topology(), device=device)


def synchronise(device: str) -> None:
    """Wait until the device has done what it was given."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def verify(device: str) -> str:
    """Compare every gradient of ours with Hugging Face's on the device, in fp32; return the line that says how far they are.

    Raises:
        SystemExit: a gradient differs by more than the tolerance.
    """
    import tempfile

    import torch
    from gradient_check import compare, reference_gradients
    from subjects import Planned
    from workload import Workload

    from hp_core.mesh.topology import Topology
    from hp_core.state.full import full_gradients

    torch.backends.cuda.matmul.fp32_precision = "ieee"
    workload = Workload(tokens=256, sequence=64, config=SMALL)
    with tempfile.TemporaryDirectory() as folder:
        margin = workload.write_weights(Path(folder))
        planned = Planned(workload, Topology(), device=device, weights=Path(folder))
        loss = planned.loss()
        loss.backward()
        expected, theirs = reference_gradients(workload, Path(folder), device=device)
    found = compare(full_gradients(planned.model, planned.plan), theirs)
    line = f"gradients in fp32: worst {found.worst:.1e} ({found.name}), loss {float(loss.detach()):.6f} against {expected:.6f}"
    if found.worst > TOLERANCE:
        raise SystemExit(f"device_check: FAILED: {line}, top-k margin {margin:.1e}")
    return f"{line}, top-k margin {margin:.1e}"


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one row in a process of its own; return its line, or its error."""
    options = ["--device", args.device, "--steps", str(args.steps), "--warmup", str(args.warmup), "--row", name]
    try:
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no result in {LIMIT_S} s"}
    found = re.search(r"JSON (\{.*\})", done.stdout)
    return json.loads(found.group(1)) if found else {"error": (done.stderr.strip().splitlines() or ["no line"])[-1][:200]}


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the lines of the markdown table; the ratio is the row's median over ours."""
    times = {name: [s for run in runs for s in run.get("seconds", ())] for name, runs in results.items()}
    ours = statistics.median(times["hp"]) if times.get("hp") else float("nan")
    lines = ["| row | median ms | range | peak GB | row / HP |", "|---|---|---|---|---|"]
    for name, found in times.items():
        if not found:
            lines.append(f"| {NAMES[name]} | failed: {results[name][0]['error']} | | | |")
            continue
        peak, median = max(run.get("peak_gb", 0.0) for run in results[name]), statistics.median(found)
        spread = f"{min(found) * 1e3:.1f}-{max(found) * 1e3:.1f}"
        lines.append(f"| {NAMES[name]} | {median * 1e3:.1f} | {spread} | {peak:.2f} | {median / ours:.2f} |")
    return lines


def main() -> None:
    """Compare gradients, run the rows round after round, and print the table."""
    args = parse()
    become_ranks(1, device=args.device)
    if args.row:
        return run_row(args)
    import torch
    import transformers

    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("device_check: torch finds no GPU here; --device cpu runs the same code with a tiny model")
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"{device}; torch {torch.__version__}, transformers {transformers.__version__}; {verify(args.device)}", flush=True)
    rows = [name for name in NAMES if name != "titan" or importlib.util.find_spec("torchtitan")]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in rows}
    for turn in range(args.rounds):
        for name in rows[:: 1 if turn % 2 == 0 else -1]:
            results[name].append(measure(name, args))
    print("\n".join(table(results)))
    return None


if __name__ == "__main__":
    main()
