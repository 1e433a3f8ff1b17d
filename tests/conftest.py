"""What the fork server of the distributed tests imports before its first job; property tests without a stopwatch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import hypothesis
import pytest

# A machine that runs several processes at once is slow now and then; that is no property of the code.
hypothesis.settings.register_profile("hp", deadline=None)
hypothesis.settings.load_profile("hp")

PRELOADED = (
    "hp_components.grouped_experts",
    "hp_components.linear_cross_entropy",
    "hp_components.mla_attention",
    "hp_components.vocab_embedding",
    "hp_core.testing.subject",
    "hp_expert_parallel.contexts",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Name the modules, if any test starts processes: importing the ranks imports torch."""
    if any(item.get_closest_marker("distributed") for item in session.items):
        from hp_core.testing.ranks import preload

        preload(*PRELOADED)


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_is_left_behind() -> Iterator[None]:
    """End a process group that a module's tests started in this process: the next module starts its own."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
