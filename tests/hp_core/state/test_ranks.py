"""An error on one rank is an error on all of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hp_core.errors import CheckpointError
from hp_core.state.ranks import agree
from hp_core.testing.ranks import run_ranks


def lack_a_file_on_rank_1() -> str:
    error = CheckpointError("HP804", "/ckpt holds no weights", expected="a folder with weights", fix="copy them")
    try:
        agree(error if dist.get_rank() == 1 else None, world=2)
    except CheckpointError as caught:
        return str(caught)
    return "went on"


@pytest.mark.distributed
def test_every_rank_raises_and_says_who_found_it():
    assert run_ranks(2, lack_a_file_on_rank_1) == [
        "HP804: /ckpt holds no weights; expected a folder with weights. Found by rank 1. fix: copy them",
        "HP804: /ckpt holds no weights; expected a folder with weights. fix: copy them",
    ]


def test_one_rank_alone_raises_its_own_error_or_goes_on():
    agree(None, world=1)
    with pytest.raises(CheckpointError, match="no weights"):
        agree(CheckpointError("HP804", "no weights"), world=1)
