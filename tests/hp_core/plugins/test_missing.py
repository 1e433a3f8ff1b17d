"""What is known about plugins that are not installed agrees with those that are."""

import json
from pathlib import Path

import pytest

import hp_core
from hp_core.plugins import kinds
from hp_core.plugins.load import load_plugins, plugins_from
from hp_core.plugins.missing import known_distributions, known_owner, not_installed, unreleased

KNOWN = json.loads((Path(hp_core.__file__).parent / "plugins" / "known.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", sorted(KNOWN.keys() & kinds.TYPES.keys()))
def test_a_known_name_is_provided_by_the_distribution_that_it_is_known_for(kind: str) -> None:
    plugins = load_plugins(environ={})
    installed = {record.distribution for record in plugins.records}
    for name, distribution in KNOWN[kind].items():
        if distribution in installed:
            assert plugins.owner(kind, name).distribution == distribution


@pytest.mark.parametrize("kind", ["adapter", "command", "section"])
def test_what_our_plugins_provide_is_known(kind: str) -> None:
    plugins = load_plugins(environ={})
    for name, provided in getattr(plugins, f"{kind}s").items():
        if provided.plugin.distribution in known_distributions():
            assert known_owner(kind, name) == provided.plugin.distribution


def test_what_this_repository_has_is_not_said_to_be_unreleased() -> None:
    root = Path(hp_core.__file__).parents[1]
    projects = [*root.glob("*/pyproject.toml"), *root.glob("plugins/*/pyproject.toml")]
    names = {line.split('"')[1] for project in projects for line in project.read_text().splitlines() if line[:6] == "name ="}
    assert names >= {"hp-trainer", "hp-qwen3-moe"}
    assert not names & unreleased().keys()
    assert unreleased().keys() <= known_distributions()


def test_names_that_would_be_added_are_grouped_by_distribution() -> None:
    assert not_installed("command", plugins_from()) == {"hp-trainer": ["train"]}
    assert not_installed("protocol", plugins_from())["hp-expert-parallel"] == ["ep:all_to_all", "ep:dedup"]
    assert "rms_norm@npu" in not_installed("kernel", plugins_from())["hp-npu"]
    assert not_installed("command", load_plugins(environ={})) == {}
