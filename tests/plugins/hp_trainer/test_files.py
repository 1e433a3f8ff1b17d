"""The run directory and its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hp_core.errors import RunError
from hp_trainer.files import claim_directory, write_text


def test_without_a_name_the_first_free_number_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [claim_directory(None, recipe=Path("recipes/tiny.yaml")) for _ in range(2)]
    assert names == [tmp_path / "runs" / "tiny-1", tmp_path / "runs" / "tiny-2"]
    assert all(name.is_dir() for name in names)


def test_a_named_directory_may_be_new_or_empty(tmp_path: Path) -> None:
    assert claim_directory(str(tmp_path / "a" / "b"), recipe=Path("r.yaml")) == tmp_path / "a" / "b"
    assert claim_directory(str(tmp_path / "a" / "b"), recipe=Path("r.yaml")) == tmp_path / "a" / "b"


def test_a_named_directory_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunError) as error:
        claim_directory(str(tmp_path), recipe=Path("r.yaml"))
    assert error.value.line == (
        f"hp: error[HP705]: the run directory {tmp_path} is not empty; expected a new or an empty one."
        " fix: choose another --run-dir"
    )


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError) as error:
        claim_directory(str(tmp_path / "file" / "run"), recipe=Path("r.yaml"))
    assert error.value.line == (
        f"hp: error[HP705]: the run directory '{tmp_path}/file/run' cannot be created: Not a directory."
        " fix: choose another with --run-dir"
    )


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(RunError) as error:
        claim_directory(name, recipe=Path("r.yaml"))
    assert error.value.line == (
        f"hp: error[HP705]: the run directory {name!r} cannot be created: no file can have this name."
        " fix: choose another with --run-dir"
    )


def test_a_full_disk_is_one_line() -> None:
    with pytest.raises(RunError) as error:
        write_text(Path("/dev/full"), "plan")
    assert error.value.line == (
        "hp: error[HP704]: /dev/full cannot be written: No space left on device."
        " fix: free space there, or choose another place with --run-dir"
    )


def test_a_file_that_could_not_be_written_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text[:2].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(RunError, match="HP704"):
        write_text(tmp_path / "plan.json", "plan")
    assert not list(tmp_path.iterdir())
