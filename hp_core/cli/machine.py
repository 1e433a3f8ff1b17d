"""What this machine has for torch to compute and to communicate with. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

ACCELERATORS = ("cuda", "npu", "xpu", "mps")


def devices_found() -> Mapping[str, tuple[str, ...]]:
    """Return kind -> one description per device; the CPU is always there and counts as one."""
    found: dict[str, tuple[str, ...]] = {"cpu": (_cpu(),)}
    for kind in ACCELERATORS:
        module = getattr(torch, kind, None)  # torch.npu exists where torch_npu has been loaded
        if module is not None and module.is_available():
            count = int(module.device_count())
            found[kind] = tuple(_name(module, index) for index in range(count))
    return found


def backends_built() -> tuple[str, ...]:
    """Return the communication backends that this torch can use."""
    if not dist.is_available():
        return ()
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "xccl": dist.is_xccl_available()}
    hccl = ("hccl",) if hasattr(dist.Backend, "HCCL") else ()
    return (*(name for name, there in built.items() if there), *hccl)


def _cpu() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{cores} {'core' if cores == 1 else 'cores'}{_memory()}"


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return ""
    return f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"


def _name(module: object, index: int) -> str:
    get_name = getattr(module, "get_device_name", None)  # mps has one device without a name
    return str(get_name(index)) if get_name is not None else "1"
