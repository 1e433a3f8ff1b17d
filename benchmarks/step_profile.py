"""Where the time of a step goes, in ten lines: operators by their own time, put under what they compute.

An operator belongs to the innermost range around it that says what it is: a fused function of ours and its backward, a
collective, the optimizer, clipping. A product outside of all of these is a projection. What no operator covers is Python.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function

STEPS, WARMUP = 3, 3  # memory that lies idle while the profiler starts may have to come back first
WAIT = "hp: wait for a collective"
PYTHON = "Python and the rest"
MOVING, WAITING = "collectives: moving", "collectives: waiting for other ranks"
PARTS: tuple[tuple[str, str], ...] = (  # the first whose pattern the name of an operator, or of a range around it, matches
    ("optimizer", r"Optimizer\.step|_fused_adamw"),
    ("clipping", r"^clipping$"),
    (
        MOVING,
        rf"^c10d::|^_c10d|^{WAIT}$|AllGather|ReduceScatter|AllReduce|_Identity(Backward)?$|^FSDP::",
    ),
    ("head and loss", r"TokenLosses|CrossEntropy|^aten::(cross_entropy|nll)"),
    ("attention", r"Blocked|WithLse|_Attention|_Attend|scaled_dot_product|_Ring|_GatherVisible"),
    ("experts", r"ExpertMLP|Expert|grouped_mm|Permute|SwiGLU|_Dispatch|_Combine"),
)
PROJECTIONS = re.compile(r"^aten::(mm|addmm|bmm|linear|matmul|mkldnn_linear)$")
ELEMENTS = "norms, rotary, router, element-wise"


def part_of(event: Any) -> str:
    """Return the part that a profiler's event belongs to, by its own name or the nearest range around it that says so."""
    node = event
    while node is not None:
        for part, pattern in PARTS:
            if re.search(pattern, node.name):
                return part
        node = node.cpu_parent
    return "projections and dense blocks" if PROJECTIONS.search(event.name) else ELEMENTS


def profile(step: Callable[[], float], *, seconds: float, world: int) -> None:
    """Print the parts of rank 0's step by time; all ranks call this. ``seconds``: of a step that was not profiled."""
    turns = torch.profiler.schedule(wait=0, warmup=WARMUP, active=STEPS, repeat=1)
    with waits_recorded(), torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=turns) as profiler:
        wall = 0.0
        for turn in range(WARMUP + STEPS):
            if world > 1:
                dist.barrier()
            begin = time.perf_counter()
            step()
            wall += (time.perf_counter() - begin) / STEPS if turn >= WARMUP else 0.0
            profiler.step()
    main = main_thread(profiler.events())
    events = [event for event in profiler.events() if event.thread == main and not event.name.startswith("ProfilerStep")]
    found: dict[str, float] = defaultdict(float)
    for event in events:
        found[part_of(event)] += event.self_cpu_time_total / 1e6 / STEPS
    found[PYTHON] = wall - sum(found.values())
    waited = waiting([event.cpu_time_total / 1e6 for event in events if event.name == WAIT], world=world) / STEPS
    found[WAITING], found[MOVING] = waited, found[MOVING] - waited
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"profile: a step of {seconds * 1e3:.1f} ms, {wall * 1e3:.1f} ms under the profiler")
        for part in sorted(found, key=lambda name: -found[name]):
            if found[part]:
                print(f"  {part:38s} {found[part] * 1e3:8.1f} ms  {found[part] / wall:5.1%}")


def main_thread(events: Any) -> int:
    """Return the thread in which the optimizer steps: others move data, and their time is not the step's."""
    return next(int(event.thread) for event in events if event.name.startswith("Optimizer.step"))


def waiting(durations: list[float], *, world: int) -> float:
    """Return how much of this rank's waits passed before the last rank came.

    Every rank waits for the same collectives in the same order; the one that came last waits only for the data.
    """
    if world == 1:
        return 0.0
    found: list[list[float]] = [[] for _ in range(world)]
    dist.all_gather_object(found, durations)
    if len({len(times) for times in found}) > 1:
        return 0.0
    return sum(mine - min(times) for mine, times in zip(durations, zip(*found, strict=True), strict=True))


@contextmanager
def waits_recorded() -> Iterator[None]:
    """Let the profiler see the main thread wait for collectives, which is no operator."""
    original = dist.Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(WAIT):
            return original(self, *args, **kwargs)

    with mock.patch.object(dist.Work, "wait", wait):
        yield
