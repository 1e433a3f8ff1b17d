"""Which tensors a checkpoint folder holds, and how each kind of damage is told."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from hp_core.errors import CheckpointError
from hp_core.state.files import INDEX, SINGLE, FileTensor, open_checkpoint

CUT_SHORT = "fix: copy the file again; it may have been cut short"


def told(folder) -> str:
    """The error's text, with the folder's own path left out."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return str(caught.value).replace(str(folder), "CKPT")


def sharded(folder, **index):
    save_file({"a": torch.zeros(2, 3)}, folder / "one.safetensors")
    save_file({"b": torch.ones(4, dtype=torch.bfloat16)}, folder / "two.safetensors")
    weights = {"a": "one.safetensors", "b": "two.safetensors", **index}
    (folder / INDEX).write_text(json.dumps({"weight_map": weights}))


def test_a_single_file_is_described_by_its_header(tmp_path):
    save_file({"a": torch.zeros(2, 3), "s": torch.zeros(())}, tmp_path / SINGLE)
    assert open_checkpoint(tmp_path).tensors == {
        "a": FileTensor(file=SINGLE, shape=(2, 3), dtype="F32"),
        "s": FileTensor(file=SINGLE, shape=(), dtype="F32"),
    }


def test_shards_are_found_through_the_index_and_read_one_tensor_at_a_time(tmp_path):
    sharded(tmp_path)
    files = open_checkpoint(tmp_path)
    assert files.tensors["b"] == FileTensor(file="two.safetensors", shape=(4,), dtype="BF16")
    with files.reader() as reader:
        assert torch.equal(reader.read("b"), torch.ones(4, dtype=torch.bfloat16))


def test_a_path_that_is_no_folder(tmp_path):
    assert told(tmp_path / "nope") == f"HP804: CKPT is not a folder; expected a folder with {SINGLE} or {INDEX}"


def test_a_folder_without_weights(tmp_path):
    assert told(tmp_path) == f"HP804: CKPT holds no weights; expected a folder with {SINGLE} or {INDEX}"


def test_weights_that_are_not_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert told(tmp_path) == (
        "HP804: CKPT holds pytorch_model.bin, which is not a safetensors file; "
        f"expected a folder with {SINGLE} or {INDEX}. fix: load it with transformers and write it again with save_pretrained"
    )


def test_a_single_file_beside_an_index_is_ambiguous(tmp_path):
    sharded(tmp_path)
    save_file({"a": torch.zeros(2, 3)}, tmp_path / SINGLE)
    assert told(tmp_path) == (
        "HP804: CKPT holds both model.safetensors and model.safetensors.index.json, which are two checkpoints; "
        "expected one of them. fix: remove the one that you do not mean"
    )


def test_an_index_may_name_the_single_file_as_its_shard(tmp_path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE}}))
    assert set(open_checkpoint(tmp_path).tensors) == {"a"}


def test_an_index_that_nests_too_deeply(tmp_path):
    (tmp_path / INDEX).write_text("[" * 200_000)
    found = told(tmp_path)
    assert found.startswith(f"HP804: CKPT/{INDEX} is not a readable index (RecursionError: maximum recursion depth exceeded")
    assert found.endswith('); expected JSON with a "weight_map" of file keys to shard names')


def test_a_missing_shard(tmp_path):
    sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    assert told(tmp_path) == (
        f"HP804: CKPT lacks the shard two.safetensors, which by {INDEX} holds 1 of 2 tensors. "
        "fix: copy the missing file, or the whole checkpoint again"
    )


def test_an_index_that_is_not_what_the_shards_hold(tmp_path):
    sharded(tmp_path, c="two.safetensors")
    assert told(tmp_path) == (
        f"HP804: CKPT/{INDEX} and the shards disagree about c; expected the same tensors in both. "
        "fix: copy the checkpoint again"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{}", "KeyError: 'weight_map'"),
        ("[]", "TypeError: list indices must be integers or slices, not str"),
        ('{"weight_map": {"a": 3}}', None),
    ],
)
def test_an_index_that_cannot_be_read(tmp_path, text, reason):
    (tmp_path / INDEX).write_text(text)
    found = told(tmp_path)
    assert found.startswith(f"HP804: CKPT/{INDEX} is not a readable index (")
    assert found.endswith('); expected JSON with a "weight_map" of file keys to shard names')
    assert reason is None or f"({reason})" in found


@pytest.mark.parametrize("keep", [0, 5, 100, -4])
def test_a_damaged_file(tmp_path, keep):
    save_file({"a": torch.zeros(20, 3)}, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()[:keep]
    (tmp_path / SINGLE).write_bytes(content)
    found = told(tmp_path)
    assert found.startswith(f"HP804: CKPT/{SINGLE} ({len(content)} bytes) is not a readable safetensors file (")
    assert found.endswith(f"). {CUT_SHORT}")
