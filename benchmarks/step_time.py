#!/usr/bin/env python3
"""Step time of a small MoE through HP's own planner and applier: forward, backward, clipping, AdamW, the loss of all ranks.

    python benchmarks/step_time.py --mesh tp=2 --dtype fp32 --steps 5 --warmup 2
    python benchmarks/step_time.py --mesh fsdp=2 --verify        # compares every gradient with Hugging Face first
    python benchmarks/step_time.py --mesh fsdp=2,ep=2 --verify   # experts over both ranks; --set protocols.ep=all_to_all
    python benchmarks/step_time.py --kind dsv3 --processes 4 --routing skewed --packed
    python benchmarks/step_time.py --mesh tp=2 --profile         # where the time of a step goes, in ten lines

It starts its own ranks and prints one line ``JSON {...}`` with ``median_s``, ``GFLOPs_per_s`` and ``rss_mb``, so that it can
stand as a row beside other frameworks' workers. The model and the global batch (2,048 tokens) are the ones those use.
``--framework hf`` times Hugging Face's own model on the same workload.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable

from ranks import become_ranks

from hp_core.mesh.topology import Topology

KINDS, DTYPES = ("qwen3", "dsv3"), ("fp32", "bf16")


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("hp", "hf"), default="hp")
    parser.add_argument("--mesh", default="", help="short form, e.g. tp=2 or fsdp=2; empty: one process")
    parser.add_argument("--processes", type=int, help="what the mesh leaves over of them becomes fsdp")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--kind", choices=KINDS, default="qwen3")
    parser.add_argument("--sequence", type=int, default=512, help="of a row; the batch has 2,048 tokens in any case")
    parser.add_argument("--packed", action="store_true", help="several documents in a row")
    parser.add_argument("--routing", choices=("even", "skewed"), default="even", help="see workload.Workload")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE", help="recipe settings")
    parser.add_argument("--verify", action="store_true", help="compare loss and every gradient with Hugging Face, fp32, 1e-5")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    return parser.parse_args()


def topology_of(args: argparse.Namespace) -> Topology:
    """Return the mesh, with fsdp over what it leaves of ``--processes``."""
    if not args.processes:
        return Topology.parse(args.mesh) if args.mesh else Topology()
    degrees = dict(part.split("=") for part in args.mesh.split(",") if part)
    used = math.prod(int(degree) for axis, degree in degrees.items() if axis != "ep")
    topology = Topology.parse(",".join(filter(None, (args.mesh, f"fsdp={args.processes // used}"))))
    if topology.world != args.processes:
        raise SystemExit(f"{args.processes} processes cannot be divided over {args.mesh}")
    return topology


def work(args: argparse.Namespace, topology: Topology) -> None:
    """Run on one rank: build, verify if asked, time the steps, print the line on rank 0."""
    import torch
    from subjects import HuggingFace, Planned, shared_weights, start_job
    from workload import Workload

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    start = time.time()
    names = ("kind", "dtype", "sequence", "packed", "routing")
    workload = Workload(**{name: getattr(args, name) for name in names})
    rank = start_job(topology.world)
    weights, margin = None, float("nan")
    if args.verify or args.routing == "skewed":
        weights, margin = shared_weights(workload, world=topology.world)
    subject: HuggingFace | Planned
    if args.framework == "hf":
        subject = HuggingFace(workload, world=topology.world, weights=weights)
    else:
        subject = Planned(workload, topology, sets=args.sets, weights=weights)
        if args.verify and weights is not None:
            from gradient_check import verify

            verify(subject, weights=weights, margin=margin)
    times, losses = timed(subject.step, count=args.warmup + args.steps, world=topology.world)
    if args.profile:
        from step_profile import profile

        profile(subject.step, seconds=statistics.median(times[args.warmup :]), world=topology.world)
    if rank == 0:
        line = {"fw": args.framework, "mode": args.mesh or "none", "world": topology.world, **vars_of(args)}
        report({**line, "setup_s": round(time.time() - start, 1)}, times[args.warmup :], losses=losses, flops=workload.flops)
    sys.stdout.flush()
    os._exit(0)


def timed(step: Callable[[], float], *, count: int, world: int) -> tuple[list[float], list[float]]:
    """Return the seconds and the losses of ``count`` steps; all ranks begin each together."""
    import torch.distributed as dist

    times, losses = [], []
    for _ in range(count):
        if world > 1:
            dist.barrier()
        begin = time.perf_counter()
        losses.append(step())
        times.append(time.perf_counter() - begin)
    return times, losses


def vars_of(args: argparse.Namespace) -> dict[str, object]:
    """Return what the line says of the workload."""
    return {name: getattr(args, name) for name in ("dtype", "kind", "sequence", "packed", "routing")}


def report(line: dict[str, object], times: list[float], *, losses: list[float], flops: float) -> None:
    """Print the worker's JSON line; ``flops``: of one step."""
    median = statistics.median(times)
    found = {
        **line, "median_s": round(median, 4), "min_s": round(min(times), 4), "loss0": round(losses[0], 4),
        "lossN": round(losses[-1], 4), "GFLOP": round(flops / 1e9, 1), "GFLOPs_per_s": round(flops / median / 1e9, 1),
        "tok_s": round(2048 / median), "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "note": "",
    }  # fmt: skip
    print("JSON " + json.dumps(found), flush=True)


def main() -> None:
    """Be a rank, or start the ranks and wait for them."""
    args = parse()
    topology = topology_of(args)
    become_ranks(topology.world)
    work(args, topology)


if __name__ == "__main__":
    main()
