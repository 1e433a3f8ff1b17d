"""Every difference between a checkpoint and a plan has a code and a text, and is found before anything is loaded."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from hp_core.errors import CheckpointError
from hp_core.state.check import check
from hp_core.state.files import SINGLE, open_checkpoint
from hp_core.state.manifest import Entry, Manifest, Piece

FIX = (
    "expected exactly the model's tensors. fix: use the configuration that the checkpoint was made with, or another checkpoint"
)


def entry(name: str, *aliases: str, shape=(2, 2), dtype="float32") -> Entry:
    names = tuple((Piece(key=key, shape=shape),) for key in (name, *aliases))
    return Entry(fqn=name, parameter=name, shape=shape, dtype=dtype, names=names)


def manifest(*entries: Entry, ignored=()) -> Manifest:
    return Manifest(entries=entries, ignored=ignored)


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes tensors and opens the checkpoint."""

    def write(**tensors):
        save_file(tensors, tmp_path / SINGLE)
        return open_checkpoint(tmp_path)

    return write


def told(wanted: Manifest, files) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(wanted, files)
    return str(caught.value).replace(str(files.folder), "CKPT")


def test_a_checkpoint_that_fits(folder):
    agreement = check(manifest(entry("a"), entry("b")), folder(a=torch.zeros(2, 2), b=torch.zeros(2, 2)))
    assert [source.pieces[0].key for source in agreement.sources] == ["a", "b"]
    assert (agreement.ignored, agreement.notes) == ((), ())


def test_missing_tensors_are_named_up_to_three(folder):
    wanted = manifest(*(entry(name) for name in "abcde"))
    assert told(wanted, folder(a=torch.zeros(2, 2))) == f"HP801: checkpoint CKPT lacks 4 tensors: b, c, d and 1 more; {FIX}"


def test_unexpected_tensors_are_named(folder):
    files = folder(a=torch.zeros(2, 2), z=torch.zeros(1))
    assert told(manifest(entry("a")), files) == f"HP802: checkpoint CKPT has 1 unexpected tensor: z; {FIX}"


def test_tensors_of_another_shape_or_kind_are_named(folder):
    files = folder(a=torch.zeros(2, 3), b=torch.zeros(2, 2, dtype=torch.int64), c=torch.zeros(2, 2))
    wanted = manifest(entry("a"), entry("b"), entry("c", dtype="int64"))
    assert told(wanted, files) == (
        "HP803: checkpoint CKPT has 3 misfitting tensors: a is [2, 3] and not [2, 2], b is I64 and cannot become float32, "
        f"c is F32 and cannot become int64; {FIX}"
    )


def test_all_kinds_of_problems_are_told_at_once(folder):
    files = folder(a=torch.zeros(3), z=torch.zeros(1))
    assert told(manifest(entry("a"), entry("b")), files) == (
        "HP801: checkpoint CKPT lacks 1 tensor: b; it has 1 unexpected tensor: z; "
        f"it has 1 misfitting tensor: a is [3] and not [2, 2]; {FIX}"
    )


def test_quantised_weights_are_refused(folder):
    files = folder(a=torch.zeros(2, 2).to(torch.float8_e4m3fn))
    assert "a is F8_E4M3 and cannot become float32" in told(manifest(entry("a")), files)


def test_keys_left_out_on_purpose_are_reported(folder):
    agreement = check(
        manifest(entry("a"), ignored=("extra.{any}",)), folder(**{"a": torch.zeros(2, 2), "extra.x": torch.zeros(1)})
    )
    assert agreement.ignored == ("extra.x",)


@pytest.mark.parametrize(
    ("stored", "wanted", "noted"),
    [
        ("bfloat16", "float32", False),
        ("float16", "float64", False),
        ("float32", "float32", False),
        ("float32", "bfloat16", True),
        ("float16", "bfloat16", True),
        ("bfloat16", "float16", True),
        ("float64", "float32", True),
    ],
)
def test_only_casts_that_round_are_noted(folder, stored, wanted, noted):
    files = folder(a=torch.zeros(2, 2, dtype=getattr(torch, stored)))
    notes = check(manifest(entry("a", dtype=wanted)), files).notes
    assert notes == ((f"1 tensor rounded from {stored} to {wanted}: a",) if noted else ())


def test_a_tied_tensor_is_read_from_whichever_name_is_stored(folder):
    agreement = check(manifest(entry("embed", "head")), folder(head=torch.zeros(2, 2)))
    assert agreement.sources[0].pieces[0].key == "head"


def test_a_tied_tensor_may_be_stored_twice_if_equal(folder):
    agreement = check(manifest(entry("embed", "head")), folder(embed=torch.ones(2, 2), head=torch.ones(2, 2)))
    assert agreement.sources[0].pieces[0].key == "embed"


def test_a_tied_tensor_with_two_values_is_refused(folder):
    files = folder(embed=torch.ones(2, 2), head=torch.zeros(2, 2))
    assert told(manifest(entry("embed", "head")), files) == (
        "HP807: checkpoint CKPT has different values for embed and head; expected equal values, since the model ties them. "
        "fix: set tie_word_embeddings: false in the configuration"
    )


def test_a_tied_tensor_that_is_not_stored_at_all_is_missed_under_its_first_name(folder):
    assert "HP801: checkpoint CKPT lacks 1 tensor: embed;" in told(
        manifest(entry("embed", "head"), entry("a")), folder(a=torch.zeros(2, 2))
    )
