"""Each plugin of tests/broken_plugins: what it gets, word for word, while the plugin beside it keeps working."""

import sys
from pathlib import Path

import pytest

from hp_core import contracts
from hp_core.cli.main import main
from hp_core.errors import FoundError, PlanError
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
        "plugin 'raises' (acme-raises 2.0) failed to import: RuntimeError: no licence. acme_raises/plugin.py:3",
        "failed to import: RuntimeError: no licence",
    ),
    (
        "exits",
        "broken",
        "HP301",
        "plugin 'exits' (acme-exits 2.0) failed to import: SystemExit: 3. acme_exits/plugin.py:3",
        "failed to import: SystemExit: 3",
    ),
    (
        "raises_base",
        "broken",
        "HP301",
        "plugin 'raises_base' (acme-raises-base 2.0) failed to import: Stop: not here. acme_raises_base/plugin.py:8",
        "failed to import: Stop: not here",
    ),
    (
        "interrupts",
        "broken",
        "HP301",
        "plugin 'interrupts' (acme-interrupts 2.0) failed to import: KeyboardInterrupt. acme_interrupts/plugin.py:3",
        "failed to import: KeyboardInterrupt",
    ),
    (
        "leaves_a_generator",
        "broken",
        "HP301",
        "plugin 'leaves_a_generator' (acme-leaves-a-generator 2.0) failed to import: GeneratorExit: closed. "
        "acme_leaves_a_generator/plugin.py:3",
        "failed to import: GeneratorExit: closed",
    ),
    (
        "replaces_modules",
        "broken",
        "HP301",
        "plugin 'replaces_modules' (acme-replaces-modules 2.0) failed to import: KeyError: 'acme_replaces_modules.plugin'.",
        "failed to import: KeyError: 'acme_replaces_modules.plugin'",
    ),
    (
        "syntax_error",
        "broken",
        "HP301",
        "plugin 'syntax_error' (acme-syntax-error 2.0) failed to import: SyntaxError: invalid syntax (plugin.py, line 3). "
        "acme_syntax_error/plugin.py:3",
        "failed to import: SyntaxError: invalid syntax (plugin.py, line 3)",
    ),
    (
        "misspelt_import",
        "broken",
        "HP301",
        "plugin 'misspelt_import' (acme-misspelt-import 2.0) failed to import: ImportError: "
        f"cannot import name 'ModuleFamly' from 'hp_core.contracts' ({contracts.__file__}); did you mean 'ModuleFamily'? "
        "acme_misspelt_import/plugin.py:3",
        f"failed to import: ImportError: cannot import name 'ModuleFamly' from 'hp_core.contracts' ({contracts.__file__}); "
        "did you mean 'ModuleFamily'?",
    ),
    (
        "misspelt_field",
        "broken",
        "HP303",
        "plugin 'misspelt_field' (acme-misspelt-field 2.0): hp_families raises TypeError: ModuleFamily.__init__() got an "
        "unexpected keyword argument 'baselin'; did you mean 'baseline'? acme_misspelt_field/plugin.py:10",
        "hp_families raises TypeError: ModuleFamily.__init__() got an unexpected keyword argument 'baselin'; "
        "did you mean 'baseline'?",
    ),
    (
        "interrupts_in_hook",
        "broken",
        "HP303",
        "plugin 'interrupts_in_hook' (acme-interrupts-in-hook 2.0): hp_families raises KeyboardInterrupt: enough. "
        "acme_interrupts_in_hook/plugin.py:10",
        "hp_families raises KeyboardInterrupt: enough",
    ),
    (
        "odd_list",
        "broken",
        "HP303",
        "plugin 'odd_list' (acme-odd-list 2.0) cannot be examined: SystemExit: not iterable. acme_odd_list/plugin.py:12",
        "cannot be examined: SystemExit: not iterable",
    ),
    (
        "odd_fields",
        "broken",
        "HP303",
        "plugin 'odd_fields' (acme-odd-fields 2.0) cannot be examined: AttributeError: 'str' object has no attribute 'when'",
        "cannot be examined: AttributeError: 'str' object has no attribute 'when'",
    ),
    (
        "odd_names",
        "broken",
        "HP402",
        "adapter ['acme']: name is ['acme']; expected lower-case letters, digits and underscores, beginning with a letter. "
        "plugin 'odd_names' (acme-odd-names 2.0)",
        "adapter ['acme']: name is ['acme']; expected lower-case letters, digits and underscores, beginning with a letter",
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
        "plugin 'hook_raises' (acme-hook-raises 2.0): hp_families raises ZeroDivisionError: division by zero. "
        "acme_hook_raises/plugin.py:10",
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


UNFIT = [
    (
        "needs_newer_core",
        ("hp-core>=0.4",),
        "incompatible",
        "HP201",
        "plugin 'needs_newer_core' (acme-needs-newer-core 2.0) needs hp-core>=0.4, found 0.1.0. fix: pip install -U hp-core",
    ),
    (
        "needs_distribution",
        ("hp-core>=0.1", "acme-nobody-has>=2"),
        "unavailable",
        "HP202",
        "plugin 'needs_distribution' (acme-needs-distribution 2.0) needs acme-nobody-has>=2, which is not installed. "
        "fix: pip install 'acme-nobody-has>=2'",
    ),
]


@pytest.mark.parametrize(("name", "requires", "status", "code", "message"), UNFIT, ids=[case[0] for case in UNFIT])
def test_a_plugin_whose_metadata_does_not_fit_is_not_imported_and_disturbs_nobody(
    fake_dist: FakeSite, name: str, requires: tuple[str, ...], status: str, code: str, message: str
) -> None:
    install(fake_dist, name, requires=requires)
    install(fake_dist, "good")
    plugins = load_plugins(environ={"HP_PLUGINS": f"{name},good"})
    found = record(plugins, name)
    assert (found.status, found.code) == (status, code)
    assert found.error is not None
    assert found.error.line == f"hp: error[{code}]: {message}"
    assert f"acme_{name}" not in sys.modules
    assert record(plugins, "good").status == "ok"


def test_a_plugin_that_is_installed_twice_names_both_folders_and_disturbs_nobody(
    fake_dist: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(fake_dist, "installed_twice")
    install(FakeSite(tmp_path / "later"), "installed_twice")
    install(fake_dist, "good")
    monkeypatch.setattr("sys.path", [str(fake_dist.folder), str(tmp_path / "later"), *sys.path[1:]])
    plugins = load_plugins(environ={"HP_PLUGINS": "installed_twice,good"})
    found, info = record(plugins, "installed_twice"), "acme_installed_twice-2.0.dist-info"
    assert found.status == "conflict"
    assert found.error is not None
    assert found.error.line == (
        "hp: error[HP103]: acme-installed-twice is installed twice; the first path hides the second. "
        f"{fake_dist.folder / info}, {tmp_path / 'later' / info}. fix: delete the first"
    )
    assert record(plugins, "good").status == "ok"


def test_a_stale_egg_info_earlier_on_the_path_is_named_and_disturbs_nobody(
    fake_dist: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "checkout" / "acme_stale_egg_info.egg-info"
    stale.mkdir(parents=True)
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme-stale-egg-info\nVersion: 1.0\n")
    install(fake_dist, "stale_egg_info")
    install(fake_dist, "good")
    monkeypatch.syspath_prepend(str(stale.parent))
    plugins = load_plugins(environ={"HP_PLUGINS": "stale_egg_info,good"})
    found = record(plugins, "stale_egg_info")
    assert found.status == "conflict"
    assert found.error is not None
    assert found.error.line == (
        "hp: error[HP103]: acme-stale-egg-info is installed twice; the first path hides the second. "
        f"{stale}, {fake_dist.folder / 'acme_stale_egg_info-2.0.dist-info'}. fix: delete the first"
    )
    assert record(plugins, "good").status == "ok"


def test_a_plugin_that_sleeps_is_loaded_and_its_time_is_known(fake_dist: FakeSite) -> None:
    install(fake_dist, "sleeps")
    install(fake_dist, "good")
    times = {plugin.record.name: plugin.seconds for plugin in load_plugins(environ={"HP_PLUGINS": "sleeps,good"}).loaded}
    assert times["sleeps"] >= 0.2
    assert record(load_plugins(environ={"HP_PLUGINS": "sleeps,good"}), "sleeps").status == "ok"


def test_a_hook_may_leave_out_an_argument_that_it_is_offered(fake_dist: FakeSite) -> None:
    install(fake_dist, "drops_argument")
    plugins = load_plugins(environ={"HP_PLUGINS": "drops_argument"})
    assert record(plugins, "drops_argument").status == "ok"
    with pytest.raises(PlanError) as caught:
        plugins.check_plan("PLAN")  # type: ignore[arg-type]
    assert caught.value.line == (
        "hp: error[HP528]: plugin 'drops_argument' (acme-drops-argument 2.0) refuses the plan: never on a Friday"
    )


def test_a_plugin_that_removes_the_finders_of_modules_breaks_no_import(fake_dist: FakeSite) -> None:
    install(fake_dist, "clears_finders")
    install(fake_dist, "good")
    before = list(sys.meta_path)
    plugins = load_plugins(environ={"HP_PLUGINS": "clears_finders,good"})
    assert sys.meta_path == before
    assert record(plugins, "good").status == "ok"


def test_a_name_that_cannot_be_compared_hides_no_other_name(fake_dist: FakeSite) -> None:
    install(fake_dist, "odd_names")
    plugins = load_plugins(environ={"HP_PLUGINS": "odd_names"})
    with pytest.raises(FoundError) as caught:
        plugins.family("acme_nrm")
    assert caught.value.line == "hp: error[HP101]: no installed plugin provides the family 'acme_nrm'"


def test_a_command_whose_module_ends_the_process_is_one_line(
    fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(fake_dist, "exits_late")
    monkeypatch.setenv("HP_PLUGINS", "exits_late")
    assert main(["leave"]) == 1
    assert (
        capsys.readouterr().err
        == "hp: error[HP403]: 'acme_exits_late.code:main' fails to import: SystemExit: 5. acme_exits_late/code.py:3\n"
    )


def test_every_broken_tree_is_tested() -> None:
    tests = Path(__file__).parents[1]
    text = "\n".join(
        (tests / name).read_text()
        for name in ("plugins/test_broken.py", "plugins/test_plugins.py", "plugins/test_shield.py", "cli/test_check.py")
    )
    assert [path.name for path in TREES.iterdir() if path.is_dir() and f'"{path.name}"' not in text] == []


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
