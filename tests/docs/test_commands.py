"""What the pages show is what happens: their commands and Python are run, their output, links and options compared.

The blocks of a page with ``console`` blocks are run in order in a folder of their own: lines that start with ``$ hp``,
``yaml file=NAME`` blocks (written to that file) and ``python`` blocks. Output is compared where it is shown; ``...`` stands
for any text, on a line of its own for any lines. A page that begins with ``<!-- after: PAGE -->`` goes on where that one ended.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hp_core.cli.main import main
from hp_core.testing.patience import HANG_S
from hp_core.testing.ranks import run_forked

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AFTER = re.compile(r"\A<!-- after: (\S+) -->")
LINK = re.compile(r"\]\(([^)\s]+)\)")

Block = tuple[str, str, str]  # language, file name, content


def blocks(page: str) -> list[Block]:
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block with the output that is shown below it."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def matches(shown: str, printed: str) -> bool:
    """Return whether the printed text is the shown one, ``...`` standing for anything."""
    lines = ["(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n" for line in shown.splitlines()]
    return re.fullmatch("".join(lines), "".join(f"{line.rstrip()}\n" for line in printed.splitlines())) is not None


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb\n", "a  \nb", True),
        ("a\n", "a\nb\n", False),
        ("a\n...\n", "a\nb\nc\n", True),
        ("a\n...\n", "a\n", True),
        ("...\nc\n", "a\nb\nc\n", True),
        ("loss ... nats\n", "loss 1.5 nats\n", True),
        ("loss ... nats\n", "loss 1.5 bits\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_dots_stand_for_any_text_and_nothing_else_does(shown, printed, same):
    assert matches(shown, printed) is same


class Workshop:
    """Runs each page once; a page's folder is kept, so that another page can go on in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: dict[str, Path] = {}

    def run(self, page: str) -> Path:
        """Run a page, and before it the page that it goes on from; return the folder it was run in."""
        if page not in self._folders:
            before = AFTER.match((DOCS / page).read_text(encoding="utf-8"))
            folder = self.run(before[1]) if before else self._new_folder(page)
            for block in blocks(page):
                run_block(*block, folder=folder)
            self._folders[page] = folder
        return self._folders[page]

    def _new_folder(self, page: str) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=Path(page).stem, dir=self._folder))
        (folder / "hp_qwen3_moe").symlink_to(ROOT / "hp_qwen3_moe")
        return folder


def run_block(language: str, name: str, content: str, *, folder: Path) -> None:
    if name:
        (folder / name).write_text(content, encoding="utf-8")
    elif language == "python":
        run_forked(execute, content, str(folder), timeout=HANG_S)
    elif language == "console":
        for command, shown in commands(content):
            printed = output_of(command, folder=folder)
            assert matches(shown, printed), f"$ {command}\nshown:\n{shown}\nprinted:\n{printed}"


def execute(code: str, folder: str) -> None:
    """Run a page's Python in a process of its own."""
    os.chdir(folder)
    exec(compile(code, "page", "exec"), {"__name__": "__main__"})


def output_of(command: str, *, folder: Path) -> str:
    """Return what an ``hp`` command prints; one that starts processes is run in a process of its own, as ``python`` is."""
    words = shlex.split(command)
    if words[0] == "python":
        line = f"{shlex.quote(sys.executable)}{command.removeprefix('python')}"
        return subprocess.run(line, cwd=folder, shell=True, capture_output=True, text=True, timeout=HANG_S, check=True).stdout
    assert words[0] == "hp", f"{command!r} is no hp command"
    if {"train", "verify"} & set(words):
        line = [sys.executable, "-c", "from hp_core.cli.main import main; raise SystemExit(main())", *words[1:]]
        done = subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=HANG_S, check=False)
        return done.stdout.decode()
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(words[1:])
    return printed.getvalue()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("docs"))


@pytest.mark.distributed
@pytest.mark.parametrize("page", [page for page in PAGES if any(block[0] == "console" for block in blocks(page))])
def test_the_page_s_commands_do_what_it_shows(page, workshop):
    workshop.run(page)


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_links_lead_somewhere(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    dead = []
    for link in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        target, _, anchor = link.partition("#")
        path = (DOCS / page).parent / target if target else DOCS / page
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            dead.append(link)
    assert dead == []


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_index():
    linked = {link.partition("#")[0] for link in LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))}
    assert set(PAGES) - linked - {"index.md"} == set()


def help_of(*command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    return printed.getvalue()


def subcommands(text: str) -> list[str]:
    """Return the words that begin the lines below "commands:" or "positional arguments: COMMAND"."""
    below = re.search(r"^(?:commands|positional arguments):\n(?:  COMMAND\n)?((?:  .*\n)+)", text, flags=re.MULTILINE)
    return re.findall(r"^ {2,4}([a-z]\S*)", below[1], flags=re.MULTILINE) if below else []


def leaf_commands() -> Iterator[list[str]]:
    """Yield every command, with its subcommand where it has any."""
    for name in subcommands(help_of()):
        below = [word for word in subcommands(help_of(name)) if "COMMAND" in help_of(name)]
        yield from ([name, word] for word in below) if below else iter([[name]])


def test_the_command_reference_has_every_command_and_option():
    page = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    lacking = []
    for command in [[], *leaf_commands()]:
        section = page.partition(f"## `hp {' '.join(command)}" if command else "# Commands")[2].partition("\n## ")[0]
        options = set(re.findall(r"--[a-z-]+", help_of(*command))) - {"--help"}
        lacking += [
            f"hp {' '.join([*command, option])}" for option in ["", *sorted(options)] if option not in section or not section
        ]
    assert lacking == []
