"""``python -m hp_deepseek``: the recipes that come with the plugin."""

import pytest

from hp_deepseek.__main__ import main, recipes


def test_the_recipes_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["hp_deepseek"])
    assert main() == 0
    assert capsys.readouterr().out.split() == ["deepseek-v3", "tiny"]


def test_a_recipe_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["hp_deepseek", "tiny"])
    assert main() == 0
    assert capsys.readouterr().out == recipes()["tiny"].read_text(encoding="utf-8")


def test_an_unknown_recipe_is_a_usage_error_that_names_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hp_deepseek", "tinny"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert all(name in err for name in ("deepseek-v3", "tiny"))
