"""What ranks on CPUs find in their environment, and that the user's own word stands."""

from __future__ import annotations

from hp_trainer.variables import CPU, set_defaults


def test_ranks_on_cpus_keep_freed_memory() -> None:
    environ: dict[str, str] = {}
    assert set_defaults(device="cpu", environ=environ)
    assert environ == CPU
    assert not set_defaults(device="cpu", environ=environ)


def test_what_the_user_has_set_stays() -> None:
    environ = {"MALLOC_TRIM_THRESHOLD_": "0"}
    set_defaults(device="cpu", environ=environ)
    assert environ == {**CPU, "MALLOC_TRIM_THRESHOLD_": "0"}


def test_accelerators_get_none() -> None:
    environ: dict[str, str] = {}
    assert not set_defaults(device="cuda", environ=environ)
    assert environ == {}
