"""The wheels, installed as a user installs them: outside the checkout, nothing editable, each plugin also alone."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from hp_core.testing.environments import Environment, build_wheels, thin_environment

pytest.importorskip("hatchling", reason="building wheels needs hatchling: tox run -e wheels")

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {
    "hp-core": (ROOT, "hp_core"),
    "hp-components": (ROOT / "plugins" / "hp_components", "src/hp_components"),
    "hp-expert-parallel": (ROOT / "plugins" / "hp_expert_parallel", "src/hp_expert_parallel"),
    "hp-context-parallel": (ROOT / "plugins" / "hp_context_parallel", "src/hp_context_parallel"),
    "hp-npu": (ROOT / "plugins" / "hp_npu", "src/hp_npu"),
    "hp-trainer": (ROOT / "plugins" / "hp_trainer", "src/hp_trainer"),
    "hp-deepseek": (ROOT / "hp_deepseek", "src/hp_deepseek"),
    "hp-qwen3-moe": (ROOT / "hp_qwen3_moe", "src/hp_qwen3_moe"),
}
RECIPE = """
model:
  adapter: qwen3_moe
  dtype: float32
  config:
    {vocab_size: 256, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8,
     intermediate_size: 32, moe_intermediate_size: 16, num_experts: 4, num_experts_per_tok: 2, max_position_embeddings: 64}
mesh: {tp: 2}
train: {steps: 1, global_batch_size: 2, micro_batch_size: 2, sequence_length: 32, optimizer: {lr: 1.0e-2}}
data: {source: text, path: text.txt}
run: {tensorboard: false}
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    assert len(build_wheels([project for project, _ in PROJECTS.values()], folder=folder)) == len(PROJECTS)
    return folder


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the three distributions of the README's line, and what they require."""
    made = thin_environment(tmp_path_factory.mktemp("user"))
    made.install("hp-core", "hp-trainer", "hp-qwen3-moe", wheels=wheels)
    return made


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_a_wheel_holds_the_whole_package_its_marker_and_nothing_else(name: str, wheels: Path) -> None:
    project, package = PROJECTS[name]
    source = project / package
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {entry for entry in archive.namelist() if ".dist-info/" not in entry}
    expected = {
        f"{source.name}/{path.relative_to(source).as_posix()}"
        for path in source.rglob("*")
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in path.relative_to(source).parts)
    }
    expected |= {f"{source.name}/recipes/{path.name}" for path in (project / "recipes").glob("*.yaml")}
    assert found == expected
    assert f"{source.name}/py.typed" in found


def test_every_plugin_is_found_and_sound_outside_the_checkout(installed: Environment) -> None:
    done = installed.hp("plugins", "list", "--strict", "--json")
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert {record["distribution"]: (record["status"], record["editable"]) for record in records} == {
        "hp-components": ("ok", False),
        "hp-qwen3-moe": ("ok", False),
        "hp-trainer": ("ok", False),
    }
    assert all(record["path"].startswith(str(installed.folder)) for record in records)


def test_a_shipped_recipe_is_a_command_away(installed: Environment) -> None:
    assert installed.run("-m", "hp_qwen3_moe").stdout == "qwen3-235b-a22b\nqwen3-30b-a3b\ntiny\n"
    printed = installed.run("-m", "hp_qwen3_moe", "tiny").stdout
    assert printed == (ROOT / "hp_qwen3_moe" / "recipes" / "tiny.yaml").read_text(encoding="utf-8")


def test_the_requirements_of_the_installed_set_are_versions(installed: Environment) -> None:
    lines = installed.hp("plugins", "list", "--requirements").stdout.splitlines()
    assert [line.partition("==")[0] for line in lines] == ["hp-components", "hp-core", "hp-qwen3-moe", "hp-trainer"]


@pytest.mark.distributed
def test_two_processes_train_one_step_outside_the_checkout(installed: Environment) -> None:
    (installed.cwd / "recipe.yaml").write_text(RECIPE)
    (installed.cwd / "text.txt").write_text("a plan is data, and applying it decides nothing. " * 20)
    done = installed.hp("train", "recipe.yaml", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    (line,) = (installed.cwd / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
    environment = json.loads((installed.cwd / "run" / "environment.json").read_text())
    assert [entry.rpartition(" ")[2] for entry in environment["plugins"]] == ["components", "qwen3_moe", "trainer"]


@pytest.mark.parametrize(
    ("name", "plugins"),
    [
        ("hp-expert-parallel", ["expert_parallel"]),
        ("hp-context-parallel", ["context_parallel"]),
        ("hp-npu", ["npu"]),
        ("hp-trainer", ["trainer"]),
        ("hp-qwen3-moe", ["components", "qwen3_moe"]),
    ],
)
def test_a_distribution_alone_brings_what_it_requires_and_no_more(
    name: str, plugins: list[str], wheels: Path, tmp_path: Path
) -> None:
    made = thin_environment(tmp_path)
    made.install(name, wheels=wheels)
    done = made.hp("--strict", "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    assert [record["name"] for record in json.loads(done.stdout)] == plugins
    assert made.hp("--help").returncode == 0
