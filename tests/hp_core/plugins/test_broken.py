"""Each plugin of tests/broken_plugins: what it gets, word for word, while the plugin beside it keeps working."""

import sys
from pathlib import Path

import pytest

from hp_core.cli.main import main
from hp_core.errors import FoundError, PlanError
from hp_core.plugins.load import load_plugins
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import PluginRecord
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"


def install(site: FakeSite, name: str, **options: object) -> None:
    """Install the tree ``name`` as distribution acme-NAME 2.0 with the plugin NAME."""
    entry = f"{name} = acme_{name}.plugin"
    site.add(f"acme-{name.replace('_', '-')}", version="2.0", entry=entry, tree=TREES / name, **options)  # type: ignore[arg-type]


def record(plugins: Plugins, name: str) -> PluginRecord:
    """Return the record of the plugin called ``name``."""
    return next(found for found in plugins.records if found.name == name)


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
    assert caught.value.line == (
        "hp: error[HP101]: no installed plugin provides the family 'acme_nrm'. fix: hp plugins list shows what is installed"
    )


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
        for name in (
            "plugins/test_broken.py",
            "plugins/test_broken_declarations.py",
            "plugins/test_plugins.py",
            "plugins/test_shield.py",
            "cli/test_check.py",
            "cli/test_plan_blame.py",
        )
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
        "a module that does not exist. fix: hp plugins check dangling_reference tells what to repair"
    )


def test_a_plugin_that_fails_to_import_is_named_when_its_name_is_asked_for(fake_dist: FakeSite) -> None:
    install(fake_dist, "raises")
    plugins = load_plugins(environ={"HP_PLUGINS": "raises"})
    with pytest.raises(FoundError) as caught:
        plugins.adapter("raises")
    assert caught.value.line == (
        "hp: error[HP101]: no working plugin provides the adapter 'raises'; plugin 'raises' (acme-raises 2.0) is broken: "
        "failed to import: RuntimeError: no licence. fix: hp plugins check raises tells what to repair"
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
