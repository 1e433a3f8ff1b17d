"""Environment variables that the launcher gives to ranks on CPUs, where the user has not set them. Torch-free."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

CPU = {
    # glibc hands large freed blocks back to the system, and every step gets them again page by page: 3 to 9 % of its time
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    # tensors lie in pages of 2 MiB where the system leaves the choice to programs: 1 to 2 %
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # products that torch keeps prepared besides oneDNN, which keeps them too: tens of MB where expert sizes vary
    "LRU_CACHE_CAPACITY": "64",
}


def set_defaults(*, device: str, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set the variables of ranks on ``device`` that ``environ`` lacks; return whether there were any.

    A process reads them when it starts: they reach those that it starts later.
    """
    missing = {name: value for name, value in CPU.items() if name not in environ} if device == "cpu" else {}
    environ.update(missing)
    return bool(missing)
