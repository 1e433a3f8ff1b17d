"""Switches: which plugins the user allows."""

import pytest

from hp_core.errors import FoundError, ImportStageError
from hp_core.plugins.load import load_plugins, survey, without
from hp_core.testing.plugins import FakeSite

PLUGIN = "raise RuntimeError('must not be imported')\n"


@pytest.fixture
def site(fake_dist: FakeSite) -> FakeSite:
    """Two plugins: one that works, and one that must not even be imported."""
    fake_dist.add("acme-hp", entry="acme = acme_hp.plugin", files={"acme_hp/plugin.py": "HP_API = 1\n"})
    fake_dist.add("chip-hp", entry="chip = chip_hp.plugin", files={"chip_hp/plugin.py": PLUGIN})
    return fake_dist


def statuses(environ: dict[str, str], disabled: tuple[str, ...] = ()) -> dict[str, str]:
    """Return status and reason of the two plugins."""
    records = load_plugins(environ=environ, disabled=disabled).records
    return {r.name: f"{r.status}: {r.reason}" for r in records if r.name in ("acme", "chip")}


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("environ", "disabled", "acme", "chip"),
    [
        ({"HP_PLUGINS": "acme"}, (), "ok: None", "blocked: not named by HP_PLUGINS"),
        ({"HP_PLUGINS": " acme , "}, (), "ok: None", "blocked: not named by HP_PLUGINS"),
        ({"HP_PLUGINS": "Acme_HP"}, (), "ok: None", "blocked: not named by HP_PLUGINS"),
        ({"HP_PLUGINS": ""}, (), "blocked: not named by HP_PLUGINS", "blocked: not named by HP_PLUGINS"),
        ({"HP_PLUGINS_DISABLED": "chip"}, (), "ok: None", "blocked: disabled by HP_PLUGINS_DISABLED"),
        ({"HP_PLUGINS_DISABLED": ""}, ("chip",), "ok: None", "blocked: disabled by disabled"),
        (
            {"HP_PLUGINS": "acme,chip", "HP_PLUGINS_DISABLED": "chip"},
            (),
            "ok: None",
            "blocked: disabled by HP_PLUGINS_DISABLED",
        ),
    ],
)
def test_a_switch_blocks_a_plugin_before_it_is_imported(
    environ: dict[str, str], disabled: tuple[str, ...], acme: str, chip: str
) -> None:
    assert statuses(environ, disabled) == {"acme": acme, "chip": chip}


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("environ", "disabled", "message"),
    [
        (
            {"HP_PLUGINS": "chipp"},
            (),
            "hp: error[HP102]: HP_PLUGINS names 'chipp', but no plugin of that name is installed; did you mean 'chip'?",
        ),
        (
            {"HP_PLUGINS_DISABLED": "zzzzz"},
            (),
            "hp: error[HP102]: HP_PLUGINS_DISABLED names 'zzzzz', but no plugin of that name is installed. "
            "fix: hp plugins list --static names those that are",
        ),
        (
            {"HP_PLUGINS": "acme-pp"},
            (),
            "hp: error[HP102]: HP_PLUGINS names 'acme-pp', but no plugin of that name is installed; did you mean 'acme-hp'?",
        ),
        (
            {},
            ("acne",),
            "hp: error[HP102]: disabled names 'acne', but no plugin of that name is installed; did you mean 'acme'?",
        ),
    ],
)
def test_an_unknown_name_in_a_switch_is_an_error_with_a_suggestion(
    environ: dict[str, str], disabled: tuple[str, ...], message: str
) -> None:
    with pytest.raises(FoundError) as caught:
        load_plugins(environ=environ, disabled=disabled)
    assert caught.value.line == message


@pytest.mark.usefixtures("site")
def test_plugins_can_be_switched_off_after_loading() -> None:
    plugins = load_plugins(environ={"HP_PLUGINS": "acme"})
    fewer = without(plugins, ["acme"], source="plugins.disabled", where="recipe.yaml:4")
    assert {r.name: r.reason for r in fewer.records}["acme"] == "disabled by plugins.disabled"
    assert fewer.digest()[0] == []


@pytest.mark.usefixtures("site")
def test_an_unknown_name_switched_off_after_loading_says_where_it_is_written() -> None:
    plugins = load_plugins(environ={"HP_PLUGINS": "acme"})
    with pytest.raises(FoundError) as caught:
        without(plugins, ["acmee"], source="plugins.disabled", where="recipe.yaml:4")
    assert caught.value.line == (
        "hp: error[HP102]: plugins.disabled names 'acmee', but no plugin of that name is installed; "
        "did you mean 'acme'? recipe.yaml:4"
    )


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(("value", "strict"), [("1", None), ("yes", None), ("", True), ("0", True)])
def test_strictness_raises_the_error_of_a_broken_plugin(value: str, strict: bool | None) -> None:
    with pytest.raises(ImportStageError) as caught:
        load_plugins(environ={"HP_PLUGINS": "acme,chip", "HP_PLUGINS_STRICT": value}, strict=strict)
    assert caught.value.line == (
        "hp: error[HP301]: plugin 'chip' (chip-hp 1.0) failed to import: RuntimeError: must not be imported. "
        "chip_hp/plugin.py:1"
    )


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("environ", "strict"),
    [
        ({"HP_PLUGINS": "acme,chip"}, None),
        ({"HP_PLUGINS": "acme,chip", "HP_PLUGINS_STRICT": ""}, None),
        ({"HP_PLUGINS": "acme,chip", "HP_PLUGINS_STRICT": "0"}, None),
        ({"HP_PLUGINS": "acme,chip", "HP_PLUGINS_STRICT": "1"}, False),
        ({"HP_PLUGINS": "acme", "HP_PLUGINS_STRICT": "1"}, None),
        ({"HP_PLUGINS_DISABLED": "chip", "HP_PLUGINS_STRICT": "1"}, None),
    ],
)
def test_without_strictness_or_without_a_fault_loading_succeeds(environ: dict[str, str], strict: bool | None) -> None:
    assert load_plugins(environ=environ, strict=strict).records


@pytest.mark.usefixtures("site")
def test_a_survey_obeys_the_switches_and_runs_no_code() -> None:
    records = survey(environ={"HP_PLUGINS": "chip"}).records
    assert {r.name: (r.status, r.api, r.provides) for r in records if r.name in ("acme", "chip")} == {
        "acme": ("blocked", None, ()),
        "chip": ("ok", None, ()),
    }
    with pytest.raises(FoundError):
        survey(environ={"HP_PLUGINS": "chipp"})
