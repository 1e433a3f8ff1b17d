"""Stages 0 and 1: which distributions offer a plugin, and whether their metadata fits."""

import sys
from pathlib import Path

import pytest

from hp_core.plugins import _metadata
from hp_core.plugins.load import load_plugins
from hp_core.plugins.record import PluginRecord
from hp_core.testing.plugins import FakeSite

PLUGIN = {"acme_hp/plugin.py": "HP_API = 1\n", "acme_hp/__init__.py": ""}


def acme(site: FakeSite, **options: object) -> Path:
    """Install acme-hp 2.0 with the plugin acme."""
    arguments = {"version": "2.0", "entry": "acme = acme_hp.plugin", "files": PLUGIN, **options}
    return site.add("acme-hp", **arguments)  # type: ignore[arg-type]


def loaded(name: str = "acme") -> PluginRecord:
    """Load the plugins called ``name`` and return the first record."""
    return next(record for record in load_plugins(environ={"HP_PLUGINS": name}).records if record.name == name)


def line(record: PluginRecord) -> str:
    """Return the error line behind a record."""
    assert record.error is not None
    return record.error.line


def test_a_plugin_is_recorded_with_its_distribution(fake_dist: FakeSite) -> None:
    acme(fake_dist)
    assert loaded() == PluginRecord(
        name="acme", distribution="acme-hp", version="2.0", path=str(fake_dist.folder), core=">=0.1", api=1
    )


def test_an_editable_installation_is_recorded_with_its_project_folder(fake_dist: FakeSite) -> None:
    info = acme(fake_dist)
    (info / "direct_url.json").write_text('{"url": "file:///home/me/acme%20hp", "dir_info": {"editable": true}}')
    assert (loaded().path, loaded().editable) == ("/home/me/acme hp", True)


@pytest.mark.parametrize("text", ['{"editable"', '{"url": "file:///x", "editable": 1}', '{"dir_info": {"editable": true}}'])
def test_a_damaged_direct_url_is_no_editable_installation(fake_dist: FakeSite, text: str) -> None:
    (acme(fake_dist) / "direct_url.json").write_text(text)
    assert loaded().editable is False


def test_distributions_without_a_plugin_are_not_looked_into(fake_dist: FakeSite) -> None:
    info = fake_dist.add("other")
    (info / "entry_points.txt").write_text("[console_scripts]\nother = other_pkg:main\n[hp.plugins.not]\nx = y\n")
    assert "other" not in {found.distribution for found in _metadata.discover()}


def test_a_damaged_distribution_disturbs_nobody(fake_dist: FakeSite) -> None:
    acme(fake_dist)
    broken = fake_dist.folder / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_bytes(b"\xff\xfe[hp.plugins]")
    (fake_dist.folder / "empty-1.0.dist-info").mkdir()
    assert loaded().status == "ok"


def test_an_illegal_entry_point_is_broken(fake_dist: FakeSite) -> None:
    acme(fake_dist, entry="Acme-MoE = acme_hp.plugin")
    assert line(loaded("Acme-MoE")) == (
        "hp: error[HP106]: plugin 'Acme-MoE' (acme-hp 2.0) has the entry point Acme-MoE = 'acme_hp.plugin'; "
        "expected a lower-case name and a module, such as acme = 'acme_hp.plugin'"
    )


INSTALL_AGAIN = """in the plugin's [project.entry-points."hp.plugins"] and install it again"""  # whoever wrote it can repair it


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            "acme_hp.plugn",
            "its entry point names the module 'acme_hp.plugn', which does not exist; did you mean 'acme_hp.plugin'?",
        ),
        (
            "acme.plugin",
            "its entry point names the module 'acme.plugin', which does not exist; did you mean 'acme_hp'?",
        ),
        (
            "acme_hp.plugin:Declard",
            "its entry point names 'acme_hp.plugin:Declard', but module 'acme_hp.plugin' has no attribute 'Declard'; "
            "did you mean 'Declared'?",
        ),
    ],
)
def test_an_entry_point_that_names_nothing_says_what_was_meant(fake_dist: FakeSite, entry: str, text: str) -> None:
    files = {"acme_hp/__init__.py": "", "acme_hp/plugin.py": "class Declared:\n    HP_API = 1\n"}
    acme(fake_dist, entry=f"acme = {entry}", files=files)
    assert line(loaded()) == (
        f"hp: error[HP301]: plugin 'acme' (acme-hp 2.0) failed to import: {text} fix: correct acme = '{entry}' {INSTALL_AGAIN}"
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import acme_hp.nothing\n", "ModuleNotFoundError: No module named 'acme_hp.nothing'."),
        (
            "import acme_hp\nacme_hp.nothing\n",
            "AttributeError: module 'acme_hp' has no attribute 'nothing'. acme_hp/plugin.py:2",
        ),
    ],
)
def test_what_an_entry_point_names_is_not_to_blame_for_what_it_imports(fake_dist: FakeSite, source: str, text: str) -> None:
    acme(fake_dist, files={"acme_hp/__init__.py": "", "acme_hp/plugin.py": source})
    assert line(loaded()) == f"hp: error[HP301]: plugin 'acme' (acme-hp 2.0) failed to import: {text}"


def test_an_entry_point_may_name_an_object(fake_dist: FakeSite) -> None:
    files = {"acme_hp/__init__.py": "", "acme_hp/plugin.py": "class Declared:\n    HP_API = 1\n"}
    acme(fake_dist, entry="acme = acme_hp.plugin:Declared", files=files)
    assert loaded().status == "ok"


def test_two_entry_points_of_one_module_keep_the_first(fake_dist: FakeSite) -> None:
    info = acme(fake_dist)
    (info / "entry_points.txt").write_text("[hp.plugins]\nacme = acme_hp.plugin\nagain = acme_hp.plugin\n")
    records = load_plugins(environ={"HP_PLUGINS": "acme,again"}).records
    found = {record.name: (record.status, record.code) for record in records}
    assert (found["acme"], found["again"]) == (("ok", None), ("broken", "HP303"))


def test_a_too_new_requirement_is_incompatible(fake_dist: FakeSite) -> None:
    acme(fake_dist, requires=("hp-core>=0.4",))
    record = loaded()
    assert (record.status, record.reason) == ("incompatible", "needs hp-core>=0.4, found 0.1.0")
    assert line(record) == (
        "hp: error[HP201]: plugin 'acme' (acme-hp 2.0) needs hp-core>=0.4, found 0.1.0. fix: pip install -U hp-core"
    )


def test_a_missing_requirement_is_unavailable(fake_dist: FakeSite) -> None:
    acme(fake_dist, requires=("hp-core>=0.1", "flash-attn-nobody-has (>=2,<3)"))
    record = loaded()
    assert (record.status, record.reason) == ("unavailable", "needs flash-attn-nobody-has>=2,<3, which is not installed")
    assert line(record) == (
        "hp: error[HP202]: plugin 'acme' (acme-hp 2.0) needs flash-attn-nobody-has>=2,<3, which is not installed. "
        "fix: pip install 'flash-attn-nobody-has>=2,<3'"
    )


@pytest.mark.parametrize(
    "requirement",
    [
        "nobody-has-this; extra == 'fast'",
        "nobody-has-this; python_version < '3'",
        "hp-core[test]>=0.1",
        "hp_core ~= 0.1",
        "not a requirement at all!",
    ],
)
def test_a_requirement_that_does_not_apply_or_holds_is_no_hindrance(fake_dist: FakeSite, requirement: str) -> None:
    acme(fake_dist, requires=(requirement,))
    assert loaded().status == "ok"


def test_a_prerelease_counts(fake_dist: FakeSite) -> None:
    fake_dist.add("acme-base", version="3.0rc1")
    acme(fake_dist, requires=("acme-base>=2",))
    assert loaded().status == "ok"


def test_a_distribution_that_is_installed_twice_names_both_paths(
    fake_dist: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = acme(fake_dist)
    second = acme(FakeSite(tmp_path / "later"), version="2.1")
    monkeypatch.setattr("sys.path", [str(fake_dist.folder), str(tmp_path / "later"), *sys.path[1:]])
    record = loaded()
    assert (record.status, record.reason) == ("conflict", "acme-hp is installed twice; the first path hides the second")
    assert line(record) == (
        "hp: error[HP103]: acme-hp is installed twice; the first path hides the second. "
        f"{first}, {second}. fix: delete the first"
    )


def test_a_stale_egg_info_that_hides_a_plugin_is_found(
    fake_dist: FakeSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "checkout" / "acme_hp.egg-info"
    stale.mkdir(parents=True)
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme-hp\nVersion: 1.0\n")
    real = acme(fake_dist)
    monkeypatch.syspath_prepend(str(stale.parent))
    assert line(loaded()) == (
        f"hp: error[HP103]: acme-hp is installed twice; the first path hides the second. {stale}, {real}. fix: delete the first"
    )


def test_the_same_folder_twice_on_the_path_is_no_conflict(fake_dist: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    acme(fake_dist)
    monkeypatch.syspath_prepend(str(fake_dist.folder))
    assert loaded().status == "ok"


def test_two_distributions_with_a_plugin_of_one_name_are_both_in_conflict(fake_dist: FakeSite) -> None:
    acme(fake_dist)
    fake_dist.add("zenith-hp", entry="acme = acme_hp.plugin")
    records = load_plugins(environ={"HP_PLUGINS": "acme"}).records
    found = [record for record in records if record.name == "acme"]
    assert [(record.distribution, record.status, record.code) for record in found] == [
        ("acme-hp", "conflict", "HP105"),
        ("zenith-hp", "conflict", "HP105"),
    ]
    assert line(found[0]) == (
        "hp: error[HP105]: two distributions provide a plugin called 'acme': acme-hp 2.0, zenith-hp 1.0. "
        "fix: uninstall one of them"
    )


def test_a_conflict_of_two_distributions_ends_when_one_is_switched_off(fake_dist: FakeSite) -> None:
    acme(fake_dist)
    fake_dist.add("zenith-hp", entry="acme = acme_hp.plugin")
    records = load_plugins(environ={"HP_PLUGINS": "acme", "HP_PLUGINS_DISABLED": "zenith-hp"}).records
    found = {record.distribution: record.status for record in records if record.name == "acme"}
    assert found == {"acme-hp": "ok", "zenith-hp": "blocked"}


def test_the_sorted_order_of_records_does_not_depend_on_the_path(fake_dist: FakeSite) -> None:
    for name in ("zeta", "alpha", "mid"):
        fake_dist.add(f"{name}-hp", entry=f"{name} = {name}_hp.plugin", files={f"{name}_hp/plugin.py": "HP_API = 1\n"})
    names = [record.name for record in load_plugins(environ={"HP_PLUGINS": "zeta,alpha,mid"}).records]
    assert names == sorted(names)
