"""Where a process stands in its job."""

from __future__ import annotations

import pytest

from hp_core.errors import RunError
from hp_trainer.place import Place

FIX = "fix: start the job with hp train, or with torchrun"


def test_the_local_rank_is_the_rank_unless_the_launcher_says_otherwise() -> None:
    assert Place.of({"RANK": "1", "WORLD_SIZE": "2"}) == Place(rank=1, world=2, local_rank=1)
    assert Place.of({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}) == Place(rank=1, world=2, local_rank=0)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "x"}, "RANK is 'x'; expected a number from 0 to 1 (WORLD_SIZE is 2)"),
        ({"RANK": ""}, "RANK is ''; expected a number from 0 to 1 (WORLD_SIZE is 2)"),
        ({"RANK": "2"}, "RANK is '2'; expected a number from 0 to 1 (WORLD_SIZE is 2)"),
        ({"RANK": "-1"}, "RANK is '-1'; expected a number from 0 to 1 (WORLD_SIZE is 2)"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'; expected a number from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; expected a number from 1"),
        ({"WORLD_SIZE": "9" * 10}, "WORLD_SIZE is '9999999999'; expected a number from 1"),
        ({"LOCAL_RANK": "q"}, "LOCAL_RANK is 'q'; expected a number from 0 to 1 (WORLD_SIZE is 2)"),
    ],
)
def test_a_variable_that_is_no_number_is_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(RunError) as error:
        Place.of({"RANK": "0", "WORLD_SIZE": "2", **environ})
    assert error.value.line == f"hp: error[HP707]: the environment variable {text}. {FIX}"
