"""A name of something that is there but was never installed: HP102 says what is missing."""

from pathlib import Path

import pytest

from hp_core.errors import FoundError
from hp_core.plugins.load import load_plugins

PROJECT = """\
[project]
name = "acme-hp"

[project.entry-points."hp.plugins"]
# the plugin
acme = "acme_hp.plugin"

[tool.other]
chip = "no entry point"
"""
START = "hp: error[HP102]: HP_PLUGINS names {!r}, but no plugin of that name is installed"


def line(name: str) -> str:
    """Return the line that is said of ``HP_PLUGINS=name``."""
    with pytest.raises(FoundError) as caught:
        load_plugins(environ={"HP_PLUGINS": name})
    return caught.value.line


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a package that is only on the path."""
    (tmp_path / "src" / "acme_hp").mkdir(parents=True)
    (tmp_path / "src" / "acme_hp" / "plugin.py").write_text("raise RuntimeError('must not be imported')\n")
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    return tmp_path


@pytest.mark.parametrize("name", ["acme", "acme-hp"])
def test_a_project_with_the_entry_point_is_to_be_installed(project: Path, name: str) -> None:
    found = f"; its project is there but not installed: {project}. fix: pip install -e {project}"
    assert line(name) == START.format(name) + found


def test_a_project_in_the_working_folder_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    found = f"; its project is there but not installed: {tmp_path}. fix: pip install -e {tmp_path}"
    assert line("acme") == START.format("acme") + found


def test_a_package_without_an_entry_point_needs_one(project: Path) -> None:
    package = f"; the package {project}/src/acme_hp can be imported, but a plugin is found by its entry point alone. fix: "
    entry = "the entry point acme_hp = 'acme_hp.plugin' of the group hp.plugins"
    (project / "pyproject.toml").write_text('[project]\nname = "acme-hp"\n')
    assert line("acme_hp") == START.format("acme_hp") + package + (
        f"add {entry} to {project}/pyproject.toml, and pip install -e {project}"
    )
    (project / "pyproject.toml").unlink()
    assert line("acme-hp") == START.format("acme-hp") + package + (
        f"give it a pyproject.toml with {entry}, and pip install -e its folder"
    )


@pytest.mark.usefixtures("project")
def test_another_module_is_no_plugin() -> None:
    fix = ". fix: hp plugins list --static names those that are"
    assert line("chip") == START.format("chip") + fix
    assert line("json") == START.format("json") + fix
