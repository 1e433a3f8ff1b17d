"""What a plugin does to the process while it is listed: it is put back and told, and every other plugin and command works."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_core.plugins.shield import Interrupts, Shield
from hp_core.testing.patience import HANG_S
from hp_core.testing.plugins import FakeSite

TREES = Path(__file__).parents[2] / "broken_plugins"
LISTED = """
import os, signal, sys, warnings
from hp_core.plugins.load import load_plugins
def state():
    # identity where something else could stand in its place
    return (
        id(sys.modules), id(sys.path), tuple(sys.path), id(sys.meta_path), sys.meta_path[:3], tuple(sys.path_hooks), sys.argv,
        id(os.environ), dict(os.environ), os.getcwd(), [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
        warnings.filters[:], sys.excepthook, sys.getrecursionlimit(), [os.fstat(n)[:3] for n in range(3)],
        [(s.encoding, s.errors, s.closed) for s in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)],
    )
before, modules = state(), dict(sys.modules)
plugins = load_plugins()
assert state() == before, (state(), before)
assert all(sys.modules.get(name) is module for name, module in modules.items())
found = {plugin.record.name: plugin for plugin in plugins.loaded}
print(found["good"].record.status, found[sys.argv[1]].record.status, *found[sys.argv[1]].undone, sep="; ")
from hp_core.cli.main import main
sys.exit(main(["greet", "you"]))
"""

UNDONE = [
    ("clears_path", "sys.path; sys.path_hooks; sys.argv"),
    ("clears_modules", "sys.modules (hp_core.errors, hp_core.plugins.lazy)"),
    ("closes_streams", "standard input; standard output; standard error"),
    ("redirects_streams", "standard output; standard error"),
    (
        "changes_process",
        "sys.excepthook; the recursion limit; the current directory; environment variables (ACME, GREETING)",
    ),
    ("replaces_environment", "os.environ"),
    ("takes_signals", "signal handlers (SIGINT, SIGTERM)"),
    ("turns_warnings_into_errors", "filters of warnings"),
    ("adds_finder", ""),
]


def environment(*names: str) -> dict[str, str]:
    """Return a small environment in which only the plugins ``names`` are used."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "HP_PLUGINS": ",".join(names), "GREETING": "hello", "PYTHONDONTWRITEBYTECODE": "1"}


def install(site: FakeSite, *names: str) -> None:
    """Install the trees ``names``, each as the plugin of its name."""
    for name in names:
        entry = f"{name} = acme_{name}.plugin"
        site.add(f"acme-{name.replace('_', '-')}", version="2.0", entry=entry, tree=TREES / name)


def listing(site: FakeSite, name: str) -> subprocess.CompletedProcess[str]:
    """Load the plugin ``name`` beside good in a process of its own, and greet."""
    install(site, name, "good")
    env = {**environment(name, "good"), "PYTHONPATH": str(site.folder)}
    command = [sys.executable, "-c", LISTED, name]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=HANG_S, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(("name", "undone"), UNDONE, ids=[case[0] for case in UNDONE])
def test_what_a_plugin_changes_in_the_process_is_put_back_and_told(fake_dist: FakeSite, name: str, undone: str) -> None:
    done = listing(fake_dist, name)
    expected = f"ok; ok; {undone}" if undone else "ok; ok"
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{expected}\nhello you\n", "")


def test_a_plugin_that_changes_the_process_is_told_so_when_it_is_checked(fake_dist: FakeSite) -> None:
    install(fake_dist, "changes_process", "good")
    done = fake_dist.hp("plugins", "check", "changes_process", environ=environment("changes_process", "good"), timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  2 import")]
    assert line == (
        "  2 import        ok, but it changes what is everybody's, and that is put back: sys.excepthook, the recursion limit, "
        "the current directory, environment variables (ACME, GREETING)"
    )


def test_a_closed_stream_leaves_the_output_for_programs_as_it_is(fake_dist: FakeSite) -> None:
    install(fake_dist, "closes_streams", "redirects_streams", "good")
    listed = fake_dist.hp("plugins", "list", environ=environment("closes_streams", "redirects_streams", "good"), timeout=HANG_S)
    assert (listed.returncode, listed.stderr) == (0, "")
    statuses = [line.split() for line in listed.stdout.splitlines() if "acme" in line]
    assert {words[0]: words[-1] for words in statuses} == {"closes_streams": "ok", "good": "ok", "redirects_streams": "ok"}


def test_a_finder_that_fails_hides_no_missing_library_of_another_plugin(fake_dist: FakeSite) -> None:
    install(fake_dist, "adds_finder", "needs_npu")
    environ = environment("adds_finder", "needs_npu")
    listed = fake_dist.hp("plugins", "list", "--kind", "kernel", environ=environ, timeout=HANG_S)
    assert listed.stdout.splitlines()[1].endswith(" unavailable: torch_npu_that_nobody_has is not installed"), listed.stderr


HANGS = """
from hp_core.contracts import hookimpl
import time
HP_API = 1
try:
    open("loading", "w").close()
    time.sleep(600)
except BaseException:
    pass
"""


def test_ctrl_c_ends_the_command_and_names_the_plugin_that_was_loading_although_it_catches_everything(tmp_path: Path) -> None:
    site = FakeSite(tmp_path / "site")
    site.add("acme-hp", version="2.0", entry="acme = acme_hp.plugin", files={"acme_hp/plugin.py": HANGS})
    env = {**environment("acme"), "PYTHONPATH": str(site.folder)}
    command = [sys.executable, "-c", "import sys; from hp_core.cli.main import main; sys.exit(main(['plugins', 'list']))"]
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + HANG_S
        while not (tmp_path / "loading").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=HANG_S)
    assert (job.returncode, out, err) == (130, "", "hp: interrupted while plugin 'acme' (acme-hp 2.0) was loaded\n")


def test_an_interrupt_that_nobody_sent_is_an_exception_like_others() -> None:
    with pytest.raises(KeyboardInterrupt, match=r"^mine$"), Interrupts("while nothing happened"):
        raise KeyboardInterrupt("mine")
    with Interrupts("while nothing happened"):
        pass


def test_the_handler_of_interrupts_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupts("while nothing happened"):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_a_block_that_changes_nothing_is_told_nothing() -> None:
    with Shield("while nothing happened") as shield:
        import colorsys  # noqa: F401  # what is imported stays
    assert shield.undone == ()
    assert "colorsys" in sys.modules
