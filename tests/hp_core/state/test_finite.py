"""Weights that are not finite, or do not stay so, are named before they are loaded."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from hp_core.errors import CheckpointError
from hp_core.state.check import check
from hp_core.state.files import SINGLE, open_checkpoint
from hp_core.state.finite import check_finite
from hp_core.state.manifest import Entry, Manifest, Piece

NAN, INF = float("nan"), float("inf")
EXPECTED = "expected finite values, since no others can train"


def examine(folder, *, wanted="float32", buffer=False, **tensors) -> None:
    """Check a checkpoint of ``tensors`` for parameters (or buffers) of the dtype ``wanted``."""
    save_file(tensors, folder / SINGLE)
    files = open_checkpoint(folder)
    entries = tuple(
        Entry(
            fqn=key,
            parameter=key,
            shape=tuple(t.shape),
            dtype=wanted,
            names=((Piece(key=key, shape=tuple(t.shape)),),),
            buffer=buffer,
        )
        for key, t in tensors.items()
    )
    check_finite(check(Manifest(entries=entries), files).sources, files)


@pytest.mark.parametrize(
    ("wanted", "values", "text"),
    [
        ("float32", torch.tensor([1.0, NAN, 2.0]), "a holds nan; {}. fix: use another checkpoint"),
        ("float32", torch.tensor([1.0, INF]), "a holds inf; {}. fix: use another checkpoint"),
        ("bfloat16", torch.tensor([1.0, -INF], dtype=torch.bfloat16), "a holds -inf; {}. fix: use another checkpoint"),
        (
            "float16",
            torch.tensor([1.0, 1e30]),
            "a holds 1e+30, which is inf in float16; {}. fix: set model.dtype to bfloat16 or float32",
        ),
        (
            "float16",
            torch.tensor([-7e4, 1.0], dtype=torch.bfloat16),
            "a holds -7.01e+04, which is -inf in float16; {}. fix: set model.dtype to bfloat16 or float32",
        ),
        (
            "bfloat16",
            torch.tensor([3.4e38, 1.0]),
            "a holds 3.4e+38, which is inf in bfloat16; {}. fix: set model.dtype to bfloat16 or float32",
        ),
    ],
)
def test_a_weight_that_is_not_finite_is_named(tmp_path, wanted, values, text):
    with pytest.raises(CheckpointError) as caught:
        examine(tmp_path, wanted=wanted, a=values, b=torch.ones(2))
    found = str(caught.value).replace(str(tmp_path), "CKPT")
    assert found == f"HP803: checkpoint CKPT has weights that are not finite: {text.format(EXPECTED)}"


def test_the_greatest_values_that_fit_are_accepted(tmp_path):
    examine(tmp_path, wanted="float16", a=torch.tensor([65504.0, -65504.0]), empty=torch.zeros(0, 2))


def test_a_buffer_may_hold_infinities(tmp_path):
    examine(tmp_path, buffer=True, mask=torch.tensor([0.0, -INF]))
