"""Ranks compare their plugins before the first collective."""

from types import SimpleNamespace

import pytest

from hp_core.errors import RunError
from hp_core.plugins.agreement import check_same_plugins
from hp_core.plugins.plugins import Plugins


class FakeStore(dict[str, bytes]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        """Store a value as a real store does."""
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        """Return a stored value."""
        return self[key]


def loaded(*lines: str) -> Plugins:
    """Stand for plugins with this digest."""
    return SimpleNamespace(digest=lambda: (sorted(lines), "hash"))  # type: ignore[return-value]


def compared(first: Plugins, other: Plugins) -> None:
    """Compare the plugins of rank 0 and rank 3."""
    store = FakeStore()
    check_same_plugins(first, store=store, rank=0)
    check_same_plugins(other, store=store, rank=3)


def test_equal_plugins_are_no_error() -> None:
    compared(loaded("hp-a 1 a", "hp-b 2 b"), loaded("hp-b 2 b", "hp-a 1 a"))
    compared(loaded(), loaded())


@pytest.mark.parametrize(
    ("first", "other", "difference"),
    [
        (["hp-qwen3-moe 0.1.0 qwen3_moe"], ["hp-qwen3-moe 0.1.1 qwen3_moe"], "- hp-qwen3-moe 0.1.0 + hp-qwen3-moe 0.1.1"),
        (["hp-a 1 a", "hp-b 1 b"], ["hp-a 1 a"], "- hp-b 1"),
        ([], ["hp-a 1 a"], "+ hp-a 1"),
        (["hp-a 1 a"], ["hp-a 1 other"], "- hp-a 1 a + hp-a 1 other"),
    ],
)
def test_a_rank_with_other_plugins_names_itself_and_the_difference(first: list[str], other: list[str], difference: str) -> None:
    with pytest.raises(RunError) as caught:
        compared(loaded(*first), loaded(*other))
    assert caught.value.line == (
        f"hp: error[HP701]: rank 3 loaded other plugins than rank 0: {difference}. "
        "fix: install the same plugins on every machine"
    )
