"""Each plugin of tests/broken_plugins: what it gets, word for word, while the plugin beside it keeps working."""

from pathlib import Path

import pytest

from hp_core.errors import FoundError
from hp_core.plugins.load import load_plugins
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import PluginRecord
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"

CASES = [
    (
        "raises",
        "broken",
        "HP301",
        "plugin 'raises' (acme-raises 2.0) failed to import: RuntimeError: no licence.",
        "failed to import: RuntimeError: no licence",
    ),
    (
        "exits",
        "broken",
        "HP301",
        "plugin 'exits' (acme-exits 2.0) failed to import: SystemExit: 3.",
        "failed to import: SystemExit: 3",
    ),
    (
        "needs_module",
        "broken",
        "HP301",
        "plugin 'needs_module' (acme-needs-module 2.0) failed to import: "
        "ModuleNotFoundError: No module named 'flash_attn_that_nobody_has'.",
        "failed to import: ModuleNotFoundError: No module named 'flash_attn_that_nobody_has'",
    ),
    (
        "imports_torch",
        "broken",
        "HP302",
        "plugin 'imports_torch' imports torch while it is being listed (acme_imports_torch/__init__.py:3). "
        "fix: move it behind the lazy reference",
        "imports torch while it is being listed (acme_imports_torch/__init__.py:3)",
    ),
    (
        "swallows_torch",
        "broken",
        "HP302",
        "plugin 'swallows_torch' imports torch while it is being listed (acme_swallows_torch/plugin.py:4). "
        "fix: move it behind the lazy reference",
        "imports torch while it is being listed (acme_swallows_torch/plugin.py:4)",
    ),
    (
        "unknown_hook",
        "broken",
        "HP311",
        "plugin 'unknown_hook' implements unknown hook 'hp_familys'; did you mean 'hp_families'?",
        "implements unknown hook 'hp_familys'; did you mean 'hp_families'?",
    ),
    (
        "other_api",
        "incompatible",
        "HP312",
        "plugin 'other_api' uses plugin API 2; this hp-core speaks 1.",
        "uses plugin API 2; this hp-core speaks 1",
    ),
    (
        "no_api",
        "incompatible",
        "HP312",
        "plugin 'no_api' does not say which plugin API it uses. fix: write HP_API = 1 in its plugin module",
        "does not say which plugin API it uses",
    ),
    (
        "unknown_argument",
        "broken",
        "HP313",
        "plugin 'unknown_argument' implements hp_check_plan with the unknown argument 'model'; expected plan",
        "implements hp_check_plan with the unknown argument 'model'; expected plan",
    ),
    (
        "unmarked_hook",
        "broken",
        "HP314",
        "plugin 'unmarked_hook' defines hp_families without marking it as a hook. "
        "fix: decorate it with hp_core.contracts.hookimpl",
        "defines hp_families without marking it as a hook",
    ),
    (
        "wrapper",
        "broken",
        "HP303",
        "plugin 'wrapper' (acme-wrapper 2.0): hp_families is a hook wrapper; expected a plain function",
        "hp_families is a hook wrapper; expected a plain function",
    ),
    (
        "hook_raises",
        "broken",
        "HP303",
        "plugin 'hook_raises' (acme-hook-raises 2.0): hp_families raises ZeroDivisionError: division by zero",
        "hp_families raises ZeroDivisionError: division by zero",
    ),
    (
        "returns_none",
        "broken",
        "HP303",
        "plugin 'returns_none' (acme-returns-none 2.0): hp_families returns None; expected a list of ModuleFamily",
        "hp_families returns None; expected a list of ModuleFamily",
    ),
    (
        "returns_garbage",
        "broken",
        "HP303",
        "plugin 'returns_garbage' (acme-returns-garbage 2.0): hp_families returns a dict in its list; "
        "expected only ModuleFamily",
        "hp_families returns a dict in its list; expected only ModuleFamily",
    ),
    (
        "illegal_family",
        "broken",
        "HP402",
        "family 'acme_norm': selector 'parallel' is reserved: it is derived from the mesh; expected another name. "
        "plugin 'illegal_family' (acme-illegal-family 2.0)",
        "family 'acme_norm': selector 'parallel' is reserved: it is derived from the mesh; expected another name",
    ),
    (
        "malformed_reference",
        "broken",
        "HP403",
        "family 'acme_norm': baseline is 'acme_malformed_reference.norm.Norm'; expected a lazy reference, "
        "'package.module:Attribute'. plugin 'malformed_reference' (acme-malformed-reference 2.0)",
        "family 'acme_norm': baseline is 'acme_malformed_reference.norm.Norm'; expected a lazy reference, "
        "'package.module:Attribute'",
    ),
    (
        "dangling_reference",
        "broken",
        "HP403",
        "family acme_norm: baseline points to 'acme_dangling_reference.norm:Norm', a module that does not exist. "
        "plugin 'dangling_reference' (acme-dangling-reference 2.0)",
        "family acme_norm: baseline points to 'acme_dangling_reference.norm:Norm', a module that does not exist",
    ),
    (
        "shadows",
        "broken",
        "HP402",
        "command 'plan' is hp-core's own; expected another name. plugin 'shadows' (acme-shadows 2.0)",
        "command 'plan' is hp-core's own; expected another name",
    ),
]


def install(site: FakeSite, name: str, **options: object) -> None:
    """Install the tree ``name`` as distribution acme-NAME 2.0 with the plugin NAME."""
    entry = f"{name} = acme_{name}.plugin"
    site.add(f"acme-{name.replace('_', '-')}", version="2.0", entry=entry, tree=TREES / name, **options)  # type: ignore[arg-type]


def record(plugins: Plugins, name: str) -> PluginRecord:
    """Return the record of the plugin called ``name``."""
    return next(found for found in plugins.records if found.name == name)


@pytest.mark.parametrize(("name", "status", "code", "message", "reason"), CASES, ids=[case[0] for case in CASES])
def test_a_broken_plugin_says_why_and_disturbs_nobody(
    fake_dist: FakeSite, name: str, status: str, code: str, message: str, reason: str
) -> None:
    install(fake_dist, name)
    install(fake_dist, "good")
    plugins = load_plugins(environ={"HP_PLUGINS": f"{name},good"})
    found = record(plugins, name)
    assert (found.status, found.code, found.reason) == (status, code, reason)
    assert found.error is not None
    assert found.error.line == f"hp: error[{code}]: {message}"
    assert record(plugins, "good").status == "ok"
    assert plugins.family("good_norm").name == "good_norm"


def test_every_broken_tree_is_tested() -> None:
    elsewhere = {"good", "prints", "clash_npu", "clash_acme", "needs_npu"}
    assert {path.name for path in TREES.iterdir() if path.is_dir()} == {case[0] for case in CASES} | elsewhere


def test_a_name_that_a_broken_plugin_would_provide_says_why_it_is_not_there(fake_dist: FakeSite) -> None:
    install(fake_dist, "dangling_reference")
    plugins = load_plugins(environ={"HP_PLUGINS": "dangling_reference"})
    with pytest.raises(FoundError) as caught:
        plugins.family("acme_norm")
    assert caught.value.line == (
        "hp: error[HP101]: no working plugin provides the family 'acme_norm'; plugin 'dangling_reference' "
        "(acme-dangling-reference 2.0) is broken: family acme_norm: baseline points to 'acme_dangling_reference.norm:Norm', "
        "a module that does not exist"
    )


def test_a_plugin_that_fails_to_import_is_named_when_its_name_is_asked_for(fake_dist: FakeSite) -> None:
    install(fake_dist, "raises")
    plugins = load_plugins(environ={"HP_PLUGINS": "raises"})
    with pytest.raises(FoundError) as caught:
        plugins.adapter("raises")
    assert caught.value.line == (
        "hp: error[HP101]: no working plugin provides the adapter 'raises'; plugin 'raises' (acme-raises 2.0) is broken: "
        "failed to import: RuntimeError: no licence"
    )


def test_what_a_plugin_prints_goes_to_standard_error(fake_dist: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    install(fake_dist, "prints")
    plugins = load_plugins(environ={"HP_PLUGINS": "prints"})
    assert record(plugins, "prints").status == "ok"
    assert capsys.readouterr() == ("", "hello from acme_prints\nhello from a hook\n")


def test_a_kernel_without_its_library_is_unavailable_and_stays_listed(fake_dist: FakeSite) -> None:
    install(fake_dist, "needs_npu")
    plugins = load_plugins(environ={"HP_PLUGINS": "needs_npu"})
    found = record(plugins, "needs_npu")
    assert (found.status, found.reason) == ("unavailable", "torch_npu_that_nobody_has is not installed")
    assert found.provides == ("kernel rms_norm@acme", "kernel rotary@acme")
    assert plugins.kernels["rms_norm:acme"].declaration.device == "npu"


def test_a_plugin_that_fails_to_import_under_the_guard_can_be_loaded_again(fake_dist: FakeSite) -> None:
    install(fake_dist, "imports_torch")
    first, second = (load_plugins(environ={"HP_PLUGINS": "imports_torch"}) for _ in range(2))
    assert first.records == second.records
