from __future__ import annotations

from hp_core.planner.fold import fold


def test_equal_rows_of_repeated_layers_become_one():
    rows = [("embed", ["a"]), *((f"layers.{i}.mlp", ["b"]) for i in range(4)), ("head", ["a"])]
    assert fold(rows) == [("embed", 1, ("a",)), ("layers.{0..3}.mlp", 4, ("b",)), ("head", 1, ("a",))]


def test_layers_that_differ_stay_apart():
    rows = [(f"layers.{i}.mlp", ["dense" if i in (0, 3) else "moe"]) for i in range(6)]
    assert fold(rows) == [("layers.{0,3}.mlp", 2, ("dense",)), ("layers.{1..2,4..5}.mlp", 4, ("moe",))]


def test_a_single_row_keeps_its_name_and_ports_fold_too():
    assert fold([("layers.7.mlp:x", [])]) == [("layers.7.mlp:x", 1, ())]
    assert fold([("layers.0:x", []), ("layers.1:x", [])]) == [("layers.{0..1}:x", 2, ())]


def test_only_the_first_index_folds():
    rows = [(f"layers.{i}.experts.{e}", []) for i in range(2) for e in range(2)]
    assert [name for name, _, _ in fold(rows)] == ["layers.{0..1}.experts.0", "layers.{0..1}.experts.1"]
