"""The reference pages about plugins say what the code says."""

import re
from pathlib import Path

from hp_core.plugins.hooks import HOOKS
from hp_core.plugins.reference import hooks_page

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"


def test_the_page_of_hooks_is_written_from_the_specifications() -> None:
    assert (REFERENCE / "hookspecs.md").read_text(encoding="utf-8") == hooks_page()


def test_every_hook_has_its_heading() -> None:
    assert set(re.findall(r"^## `(\w+)\(", hooks_page(), re.MULTILINE)) == HOOKS


def test_the_page_of_variables_names_every_variable_that_the_code_reads() -> None:
    sources = [path for folder in ("hp_core", "plugins", "hp_qwen3_moe") for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r'"(HP_[A-Z_]+)"', path.read_text(encoding="utf-8"))}
    page = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    assert read - {"HP_API"} == set(re.findall(r"^\| `(HP_[A-Z_]+)`", page, re.MULTILINE))
