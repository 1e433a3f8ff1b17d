"""Starting the ranks of a benchmark: the script runs itself again under torchrun, with the environment a launcher gives."""

from __future__ import annotations

import os
import sys

from hp_trainer.variables import set_defaults


def become_ranks(world: int, *, device: str = "cpu") -> None:
    """Return in every rank of ``world``; the process that was started by hand is replaced by them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    fresh = set_defaults(device=device)
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world))
    if world > 1 and "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", "0", "--rdzv-backend", "c10d",
                  "--rdzv-endpoint", "127.0.0.1:0"]  # fmt: skip
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])
    if fresh:  # what allocators and caches read when a process starts
        os.execv(sys.executable, [sys.executable, *sys.argv])
