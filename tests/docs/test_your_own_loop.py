"""The tutorial about one's own loop does what it says: its files are the ones shown, and it prints what is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.testing.patience import HANG_S

pytest.importorskip("hp_qwen3_moe")

FOLDER = Path(__file__).parents[2] / "docs" / "tutorial"
PAGE = (FOLDER / "your-own-loop.md").read_text(encoding="utf-8")
RUNS = re.findall(r"<!-- run: (\d+) (.+) -->\n```\n\$ torchrun .+\n((?:.+\n)+)```", PAGE)


@pytest.mark.parametrize("name", ["own_loop.yaml", "own_loop.py"])
def test_the_page_shows_the_file_as_it_is(name: str) -> None:
    shown = re.search(rf"<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)```\n", PAGE, flags=re.DOTALL)
    assert shown is not None
    assert shown[1] == (FOLDER / name).read_text(encoding="utf-8")


def started(world: str, sets: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Run the loop on ``world`` processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world]
    command += [str(FOLDER / "own_loop.py"), str(FOLDER / "own_loop.yaml"), str(out), *sets.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)


def run(world: str, sets: str, out: Path) -> str:
    """Return what the loop prints."""
    done = started(world, sets, out)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "sets", "shown"), RUNS, ids=[sets for _, sets, _ in RUNS])
def test_the_loop_prints_what_the_page_shows_and_writes_a_checkpoint(world: str, sets: str, shown: str, tmp_path: Path) -> None:
    printed = run(world, sets, tmp_path / "out")
    number = re.compile(r"\d+\.\d+")
    assert number.sub("#", printed) == number.sub("#", shown)
    # Two decimals of a trained loss may differ a little between processors.
    assert [float(n) for n in number.findall(printed)] == pytest.approx([float(n) for n in number.findall(shown)], abs=0.05)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.distributed
def test_a_folder_that_is_taken_is_one_line_of_one_rank(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    failed = started("2", "mesh.tp=1", tmp_path)
    assert failed.returncode != 0
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("hp: error[HP")]
    assert line.endswith("Nothing was left behind. fix: name another folder")
    shown = re.search(r"^hp: error.*$", PAGE, flags=re.MULTILINE)
    assert shown is not None
    assert line.replace(str(tmp_path), "out-fsdp") == shown[0]
    assert 'own_loop.py", line' not in failed.stderr


def test_the_page_s_packed_row() -> None:
    (code,) = re.findall(r"```python\n(import torch\n\n\ndef packed.*?)```", PAGE, flags=re.DOTALL)
    exec(compile(code, "page", "exec"), {})


def test_the_page_runs_three_meshes() -> None:
    assert [(world, sets) for world, sets, _ in RUNS] == [("2", "mesh.tp=1"), ("2", "mesh.tp=2"), ("2", "mesh.cp=2")]
