"""``hp families``: the list, one family with its whole decision table, and the page that is made of the declarations."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest

from hp_core.cli import families
from hp_core.contracts import Init, ModuleFamily, SelectorSpec, Unflatten, VariantRule, hookimpl
from hp_core.errors import FoundError
from hp_core.plugins.load import load_plugins, plugins_from
from hp_core.plugins.plugins import Plugins

ROOT = Path(__file__).resolve().parents[3]


@hookimpl
def hp_families() -> list[ModuleFamily]:
    """One deferred family with everything, and one with nothing."""
    return [
        ModuleFamily(
            name="attention",
            baseline="acme.attention:Attention",
            arguments={"window": "int"},
            selectors={"fused": SelectorSpec(type="bool", default=False)},
            variants={"local": "acme.local:Local", "ring": "acme.ring:Ring"},
            default_variant="local",
            parallel_axis="cp",
            rules=[VariantRule(when={"fused": False, "parallel": True}, variant="ring")],
            sharding="acme.layout:attention",
            transforms={"qkv": (Unflatten(0, (3, -1)),)},
            init=[Init(match="*", kind="normal", value=0.02)],
            role="attention",
        ),
        ModuleFamily(name="plain", baseline="acme.plain:Plain"),
    ]


@pytest.fixture
def plugins() -> Plugins:
    plugin = types.ModuleType("acme")
    vars(plugin).update(HP_API=1, hp_families=hp_families)
    return plugins_from(plugin)


def test_the_list_has_a_line_for_each_family(plugins, capsys):
    assert families.main(["list"], plugins) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["NAME", "BASELINE", "SELECTORS", "MEMBERS", "AXIS", "PLUGIN"],
        ["attention", "Attention", "fused", "2", "cp", "acme"],
        ["plain", "Plain", "-", "1", "-", "acme"],
    ]


def test_a_family_is_shown_with_its_whole_decision_table(plugins, capsys):
    assert families.main(["show", "attention"], plugins) == 0
    owner = plugins.owner("family", "attention")
    assert capsys.readouterr().out == (
        "family attention\n"
        f"  provided by      acme ({owner.distribution} {owner.version})\n"
        "  baseline         acme.attention:Attention\n"
        "  kind             deferred: the member is picked when the degree of cp is known\n"
        "  role             attention\n"
        "  layout provider  acme.layout:attention\n"
        "  arguments        window: int\n"
        "  selector fused   bool; default False\n"
        "  weights of qkv   Unflatten(dim=0, sizes=(3, -1))\n"
        "  init of *        normal 0.02\n"
        "\n"
        "members\n"
        "  MEMBER  CLASS  FUSED  PARALLEL\n"
        "  local   Local  False  False     default\n"
        "  ring    Ring   False  True\n"
    )


def test_json_holds_the_same(plugins, capsys):
    families.main(["show", "attention", "--json"], plugins)
    shown = json.loads(capsys.readouterr().out)
    assert shown["table"] == [
        {"when": {"fused": False, "parallel": False}, "member": "local", "constructor": "acme.local:Local", "default": True},
        {"when": {"fused": False, "parallel": True}, "member": "ring", "constructor": "acme.ring:Ring", "default": False},
    ]
    assert shown["selectors"] == {"fused": {"type": "bool", "choices": None, "default": False}}
    families.main(["list", "--json"], plugins)
    assert [row["name"] for row in json.loads(capsys.readouterr().out)][:2] == ["attention", "plain"]


def test_an_unknown_family_is_refused_with_a_suggestion(plugins):
    with pytest.raises(FoundError) as caught:
        families.main(["show", "atention"], plugins)
    assert str(caught.value) == "HP101: no installed plugin provides the family 'atention'; did you mean 'attention'?"


def test_the_reference_page_is_what_the_declarations_say():
    page = (ROOT / "docs" / "reference" / "families.md").read_text(encoding="utf-8")
    assert page == families.page(load_plugins()), "run python docs/generate.py"
