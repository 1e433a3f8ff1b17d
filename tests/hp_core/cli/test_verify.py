"""``hp verify``: what it compares, what it says when a cell fails, and what it refuses before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hp_core.cli.main import main
from hp_core.cli.verify import parser
from hp_core.mesh.topology import Topology
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe
from hp_core.testing.matrix import MESHES, matrix
from hp_core.testing.small import kept_settings, small_mesh, small_model

RECIPES = Path(__file__).parents[3] / "hp_qwen3_moe" / "recipes"
TINY = str(RECIPES / "tiny.yaml")
WRONG_NORM = (
    "\noverrides:\n  - match: model.layers.2.input_layernorm\n    replace: {kind: module, implementation: rms_norm, "
    "source_type: Qwen3MoeRMSNorm, with: {offset: 1.0}}\n"
)


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    path = tmp_path / "wrong.yaml"
    path.write_text(Path(TINY).read_text(encoding="utf-8") + WRONG_NORM, encoding="utf-8")
    return str(path)


@pytest.mark.distributed
def test_a_mesh_that_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", TINY, "--mesh", "tp=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["adapter"], found["passed"], found["failed"]) == ("qwen3_moe", 1, 0)
    assert found["changes"]["hidden_size"] == {"recipe": 128, "verified": 64}
    (cell,) = found["cells"]
    assert {item["quantity"] for item in cell["deviations"]} == {"loss", "gradient norm", "next loss", "gradient", "parameter"}
    assert cell["margin"] > 1e-6


@pytest.mark.distributed
def test_a_cell_that_fails_names_the_first_boundary_that_differs(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", wrong, "--mesh", "tp=2,fsdp=2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "0 passed, 1 failed"
    assert any("the first boundary that differs is model.layers.2.input_layernorm: output by" in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--mesh", "tp=16"],
            "hp: error[HP501]: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=16 ep=1 needs 16 processes; expected at most 8: all run "
            "on this machine. --mesh tp=16. fix: choose smaller degrees; what holds for 2 and 4 ranks is the same code for "
            "more\n",
        ),
        (
            ["--mesh", "tp=3"],
            "hp: error[HP502]: num_attention_heads (4) must be divisible by tp (3). "
            "--mesh tp=3, mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=3 ep=1. fix: set mesh.tp to 2 or 4\n",
        ),
        (
            ["--mesh", "pp=2"],
            "hp: error[HP515]: mesh.pp is 2, but pipeline parallelism is not implemented in this version; expected 1. "
            "--mesh pp=2\n",
        ),
        (
            ["--mesh", ""],
            "hp: error[HP503]: '' names no axis; expected AXIS=NUMBER, such as tp=2; one process is tp=1. --mesh ''\n",
        ),
        (
            ["--mesh", "sp=2", "cp=2", "tp=2 cp=2", "--set", "protocols.cp.inner=2"],
            "hp: error[HP503]: there is no mesh axis 'sp'; expected one of tp, cp, ep, pp, dp_shard, dp_replicate, fsdp, dp. "
            "--mesh sp=2. fix: sequence parallelism is part of tp: set tp, and mesh.sequence_parallel switches it (on by "
            "default)\n"
            "hp: error[HP503]: 'tp=2 cp=2' is not an axis and its degree; expected AXIS=NUMBER, such as tp=2. "
            "--mesh 'tp=2 cp=2'. fix: separate axes by commas: tp=2,cp=2\n"
            "hp: error[HP580]: protocol cp:allgather has one axis, but protocols.cp.inner is set; expected null. "
            "--mesh cp=2, --set protocols.cp.inner=2. fix: leave protocols.cp.inner out\n",
        ),
        (
            ["--mesh", "tp=2", "ep=2", "--set", "freeze=[nothing.*]"],
            "hp: error[HP527]: freeze pattern 'nothing.*' matches no parameter; expected an fnmatch pattern of parameter names "
            "such as model.embed_tokens.*. --mesh tp=2 ep=2, --set freeze=[nothing.*]\n",
        ),
    ],
)
def test_what_cannot_be_verified_is_one_line(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", TINY, *argv]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", told)


def test_a_refusal_is_an_object_too_where_a_program_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", TINY, "--json", "--mesh", "tp=3", "sp=2", "dp=2"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [error["code"] for error in found.pop("errors")] == ["HP503", "HP502"]
    assert found == {}
    assert main(["plan", TINY, "--json", "--set", "mesh.tp=3"]) == 1
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error == {
        "code": "HP502",
        "message": "num_attention_heads (4) must be divisible by tp (3). --set mesh.tp=3, "
        "mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=3 ep=1. fix: set mesh.tp to 2 or 4",
        "what": "num_attention_heads (4) must be divisible by tp (3)",
        "expected": "",
        "where": "--set mesh.tp=3, mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=3 ep=1",
        "fix": "set mesh.tp to 2 or 4",
    }


@pytest.mark.distributed
def test_a_step_that_rounding_decides_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", TINY, "--mesh", "tp=2", "dp=2", "--set", "loss.aux.coefficient=1e30"]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert [" ".join(line.split()) for line in failed] == [
        f"{mesh} FAILED: HP709: the step cannot be compared: of 50 random models none chooses its experts by more than "
        "0.0e+00; expected more than 1e-06 in the step and after it, so that rounding cannot turn a choice. "
        "loss.aux.coefficient is 1e+30. fix: lower loss.aux.coefficient"
        for mesh in ("tp=2", "dp=2")
    ]


def test_meshes_may_be_given_one_by_one() -> None:
    assert parser().parse_args(["r.yaml", "--mesh", "tp=2", "--mesh", "dp=2", "tp=4"]).mesh == ["tp=2", "dp=2", "tp=4"]


def test_a_matrix_has_meshes_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", TINY, "--matrix", "--mesh", "tp=2"])
    assert ended.value.code == 2
    assert "--matrix brings its own meshes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny", "qwen3-30b-a3b", "qwen3-235b-a22b"])
def test_the_matrix_of_every_recipe_can_be_planned(name: str) -> None:
    from hp_core.testing.verify import refusals

    plugins = load_plugins()
    recipe = load_recipe(RECIPES / f"{name}.yaml", plugins=plugins)
    small = small_model(recipe, MESHES)
    cells = matrix(recipe, small.case, kept_settings(recipe))
    assert len({cell.name for cell in cells}) == len(cells)
    assert refusals(cells, recipe=recipe) == {}


def test_a_model_whose_adapter_cannot_make_it_small(tmp_path: Path) -> None:
    from attrs import evolve

    from hp_core.errors import PlanError

    recipe = load_recipe(TINY, plugins=load_plugins())
    adapter = evolve(recipe.adapter, shrink=None)

    class Recipe:
        """The recipe with that adapter."""

        def __getattr__(self, name: str) -> Any:
            return adapter if name == "adapter" else getattr(recipe, name)

    with pytest.raises(PlanError) as error:
        small_model(Recipe(), [Topology(tp=2)])  # type: ignore[arg-type]
    assert str(error.value) == (
        "HP524: adapter qwen3_moe does not say how its model is made small; expected a reference in its field shrink. "
        "adapter qwen3_moe. fix: pass --full-size"
    )
    whole = small_model(Recipe(), [Topology(tp=2)], full_size=True)  # type: ignore[arg-type]
    assert whole.changes == {}


def test_a_key_that_hugging_face_writes_under_another_name_is_kept() -> None:
    recipe = load_recipe(TINY, plugins=load_plugins(), sets=["model.config.num_experts=6"])
    for full_size in (False, True):
        assert small_model(recipe, [Topology(tp=2)], full_size=full_size).case.config["num_local_experts"] == 6


@pytest.mark.parametrize(
    ("mesh", "small"),
    [
        (Topology(tp=4, dp_shard=128), Topology(tp=4, dp_shard=2)),
        (Topology(tp=2), Topology(tp=2)),
        (Topology(tp=8), Topology(tp=8)),
        (Topology(dp_replicate=4, dp_shard=4, cp=4, tp=4, ep=16), Topology(dp_shard=2, cp=2, tp=2, ep=2)),
        (Topology(dp_shard=64, ep=8), Topology(dp_shard=2, ep=2)),
    ],
)
def test_a_large_mesh_is_cut_to_eight_processes(mesh: Topology, small: Topology) -> None:
    assert small_mesh(mesh) == small
