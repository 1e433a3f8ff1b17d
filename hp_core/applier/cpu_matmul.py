"""How matrices are multiplied on a CPU: by torch's choice, or in another way that is as exact and faster.

torch multiplies fp32 matrices with MKL, which on CPUs of other makers leaves out their widest instructions. It hands them to
oneDNN only if bf16 may be used inside: CPUs with matrix units then round, the others compute in full fp32 all the same. So a
probe asks the CPU. The setting is torch's, one for the whole process.

Products of bfloat16 are emulated on CPUs without instructions for them, at a fraction of the speed of fp32. Linear layers then
multiply in fp32 and round once (:mod:`hp_core.applier.wide_linear`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from hp_core.contracts.plan import BuildPlan
from hp_core.mesh.context import MeshContext

LARGEST_ERROR = 1e-6  # of the largest element; fp32 sums of 256 products reach 3e-7
LEAST_SPEEDUP = 1.25
SIZE, ROUNDS = 256, 15


@attrs.frozen(kw_only=True)
class CpuMatmul:
    """How this job multiplies matrices on CPUs.

    ``setting`` is the plan's; ``library`` multiplies fp32: ``onednn`` or ``default``; ``bfloat16`` is multiplied as ``float32``
    by linear layers, or by ``default``. What the probe of rank 0 found, None without one: ``error`` of oneDNN's products
    relative to the largest element, ``speedup`` over the default, ``bfloat16_speedup`` of going through fp32.
    """

    setting: str
    library: str = "default"
    error: float | None = None
    speedup: float | None = None
    bfloat16: str = "default"
    bfloat16_speedup: float | None = None

    def __str__(self) -> str:
        if self.error is None or self.speedup is None or self.bfloat16_speedup is None:
            return f"{self.library} ({self.setting})"
        return (
            f"{self.library} ({self.setting}: oneDNN is {self.speedup:.1f} times as fast, its error {self.error:.0e}),"
            f" bfloat16 {self.bfloat16} (float32 is {self.bfloat16_speedup:.1f} times as fast)"
        )


def choose_cpu_matmul(plan: BuildPlan, mesh: MeshContext) -> CpuMatmul:
    """Return how products run, set so in this process. All ranks call this: rank 0 probes and decides for the job.

    ``off`` changes nothing, nor does ``auto`` while torch is deterministic: which library is faster may differ from run to run.
    """
    setting = str(plan.options.get("cpu_matmul", "off"))
    live = mesh.device.type == "cpu" and dist.get_backend() != "fake" and torch.backends.mkldnn.is_available()
    if setting != "auto" or not live or torch.are_deterministic_algorithms_enabled():
        return CpuMatmul(setting=setting)
    found = [probe() if mesh.rank == 0 else CpuMatmul(setting=setting)]
    if mesh.topology.world > 1:
        dist.broadcast_object_list(found)
    if found[0].library == "onednn":
        _set_precision("bf16")
    return found[0]


def probe() -> CpuMatmul:
    """Return what ``auto`` means on this CPU; takes some milliseconds. One thread measures: others may wait for a busy core."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    if a.dtype != torch.float32:  # something computes in fp64 in place of fp32
        return CpuMatmul(setting="auto")
    with _one_thread(), _precision("bf16"):
        error = max(_error(product, a, b) for product in (_plain, _turned, _batched, _long))
    with _one_thread():
        speedup = _speedup(a, b)
        bfloat16_speedup = _bfloat16_speedup(a, b)
    fit = error <= LARGEST_ERROR and speedup >= LEAST_SPEEDUP
    return CpuMatmul(
        setting="auto",
        library="onednn" if fit else "default",
        error=error,
        speedup=speedup,
        bfloat16="float32" if bfloat16_speedup >= LEAST_SPEEDUP else "default",
        bfloat16_speedup=bfloat16_speedup,
    )


def _plain(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def _turned(a: Tensor, b: Tensor) -> Tensor:
    return a.t() @ b.t()


def _batched(a: Tensor, b: Tensor) -> Tensor:
    return a.unflatten(0, (4, -1)) @ b.unflatten(1, (4, -1)).permute(1, 0, 2)


def _long(a: Tensor, b: Tensor) -> Tensor:
    return a.reshape(-1, SIZE // 4) @ b[: SIZE // 4]


def _error(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    exact = product(a.double(), b.double())
    return float((product(a, b).double() - exact).abs().max() / exact.abs().max())


def _speedup(a: Tensor, b: Tensor) -> float:
    """Return how many times as fast as the default oneDNN is."""

    def through(precision: str) -> Callable[[], Tensor]:
        def product() -> Tensor:
            with _precision(precision):
                return a @ b

        return product

    return _ratio(through("none"), through("bf16"))


def _bfloat16_speedup(a: Tensor, b: Tensor) -> float:
    """Return how many times as fast as the default a product of bfloat16 through fp32 is, conversions included."""
    low_a, low_b = a.bfloat16(), b.bfloat16()
    return _ratio(lambda: low_a @ low_b, lambda: (low_a.float() @ low_b.float()).bfloat16())


def _ratio(one: Callable[[], Tensor], other: Callable[[], Tensor]) -> float:
    """Return the ratio of the shortest times of products made in turn: others may use the machine."""
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for place, product in enumerate((one, other)):
            start = time.perf_counter()
            product()
            best[place] = min(best[place], time.perf_counter() - start)
    return best[0] / best[1]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    _set_precision(name)
    try:
        yield
    finally:
        _set_precision(before)


def _set_precision(name: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = name  # type: ignore[attr-defined]
