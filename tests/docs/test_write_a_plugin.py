"""The page "Write a plugin" alone makes a working plugin; broken in the ways it names, each message is the page's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.testing.patience import HANG_S
from hp_core.testing.plugins import FakeSite

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "write-a-plugin.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```\w+ file=(\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
SHOWN = re.findall(r"^\$ (hp .*)\n((?:(?!\$ |```).*\n)*)", PAGE, re.MULTILINE)
BROKEN = {  # what the page calls it -> (file, text, what takes its place)
    "`import torch` in `plugin.py`": ("plugin.py", "from hp_core", "import torch\nfrom hp_core"),
    '`baselin="acme_hp.norm:RMSNorm"`': ("plugin.py", "baseline", "baselin"),
    '`acme = "acme_hp.plugn"` in `pyproject.toml`': ("entry_points.txt", "acme_hp.plugin", "acme_hp.plugn"),
    "`def hp_familys()`": ("plugin.py", "hp_families", "hp_familys"),
    "`HP_API = 2`": ("plugin.py", "HP_API = 1", "HP_API = 2"),
    '`baseline="acme_hp.norms:RMSNorm"`': ("plugin.py", "acme_hp.norm:", "acme_hp.norms:"),
    '`baseline="acme_hp.norm:RmsNorm"`': ("plugin.py", "norm:RMSNorm", "norm:RmsNorm"),
    '`dependencies = ["hp-core>=0.4"]`': ("METADATA", "hp-core<0.2,>=0.1", "hp-core>=0.4"),
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> FakeSite:
    """The page's plugin, written to a folder of its own, built by pip and installed into another one."""
    pytest.importorskip("hatchling", reason="building the page's plugin needs hatchling: tox run -e wheels")
    folder = tmp_path_factory.mktemp("user")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    site = FakeSite(folder / "site")
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-compile", "--target", str(site.folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder / "acme-hp")], check=True, timeout=HANG_S)
    return site


def pattern(shown: str) -> str:
    lines = ["(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n" for line in shown.splitlines()]
    return "".join(lines)


def test_the_page_has_the_files_and_the_commands_that_this_test_is_about() -> None:
    assert len(FILES) == 6
    assert [command.split()[1] for command, _ in SHOWN] == ["plugins", "plugins", "plan"]
    assert all(f"| {name} |" in PAGE for name in BROKEN)


@pytest.mark.parametrize(("command", "shown"), SHOWN)
def test_the_page_s_commands_print_what_it_shows(command: str, shown: str, installed: FakeSite) -> None:
    words = [str(installed.folder.parent / word) if word == "recipe.yaml" else word for word in command.split()[1:]]
    done = installed.hp(*words, environ={"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(pattern(shown), done.stdout), done.stdout


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_told_as_the_page_says(name: str, installed: FakeSite) -> None:
    where, text, other = BROKEN[name]
    (file,) = installed.folder.rglob(where)
    before = file.read_text(encoding="utf-8")
    assert text in before
    file.write_text(before.replace(text, other), encoding="utf-8")
    try:
        done = installed.hp("plugins", "check", "acme", environ={"PYTHONDONTWRITEBYTECODE": "1"})
        others = installed.hp("plugins", "list", "--kind", "adapter", environ={"PYTHONDONTWRITEBYTECODE": "1"})
    finally:
        file.write_text(before, encoding="utf-8")
    assert done.returncode == 1
    assert f"| {name} | `{done.stderr.strip()}` |" in PAGE
    assert re.search(r"^qwen3_moe .* ok", others.stdout, re.MULTILINE)
