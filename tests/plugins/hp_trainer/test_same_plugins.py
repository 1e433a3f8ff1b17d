"""Two real ranks with different plugins: one line that names the rank and the difference, before they compute anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.testing.plugins import FakeSite

pytestmark = pytest.mark.distributed
OTHER_ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    os.environ["HP_PLUGINS_DISABLED"] = "good"
"""
TREE = Path(__file__).parents[2] / "broken_plugins" / "good"


def test_a_rank_with_other_plugins_ends_the_job_in_one_line(recipe: Path, tmp_path: Path) -> None:
    site = FakeSite(tmp_path / "site")
    site.add("acme-good", version="2.0", entry="good = acme_good.plugin", tree=TREE)
    (site.folder / "sitecustomize.py").write_text(OTHER_ON_RANK_1)
    run = tmp_path / "run"
    arguments = ["train", str(recipe), "--set", "mesh.tp=2", "--run-dir", str(run)]
    done = site.hp(*arguments, environ={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (
        1,
        "hp: error[HP701]: rank 1 loaded other plugins than rank 0: - acme-good 2.0. "
        "fix: install the same plugins on every machine\n",
    )
    assert not (run / "metrics.jsonl").exists()
