"""``hp plan`` as a user types it: the tables, one explanation, JSON, the resolved recipe, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hp_core.cli.main import main
from hp_core.cli.plan import make_plan
from hp_core.planner.serialise import plan_from_json
from hp_core.plugins.load import load_plugins
from hp_core.recipe.load import load_recipe
from hp_core.testing.patience import HANG_S

RECIPE = """\
model:
  adapter: qwen3_moe
  config: {vocab_size: 64, hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8,
           intermediate_size: 32, moe_intermediate_size: 16, num_experts: 4, num_experts_per_tok: 2, mlp_only_layers: [1]}
mesh: {tp: 2}
freeze: [model.embed_tokens.*]
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def run(capsys, *argv):
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def test_the_plain_text_folds_layers_and_adds_up(capsys, recipe):
    lines = run(capsys, recipe, "--world", "4").splitlines()
    assert lines[:4] == [
        "qwen3_moe: Qwen3MoeForCausalLM, float32 on cpu",
        "mesh: dp_replicate=1 dp_shard=2 pp=1 cp=1 tp=2 ep=1; 4 ranks, sequence parallel on, loss parallel on, "
        "shared memory on",
        "parameters: 14,624, of which 11,552 are active for a token, 2.42 MFLOP per token to train",
        "micro-batch: 1 x 4096 tokens for each of 2 data-parallel parts",
    ]
    rows = [line.split() for line in lines]
    assert ["model.layers.{0..2}.self_attn", "Qwen3MoeAttention", "varying"] in [row[:3] for row in rows]
    assert ["model.layers.{0,2}.mlp.gate", "Qwen3MoeTopKRouter", "varying"] in [row[:3] for row in rows]
    assert ["model.layers.1.mlp", "Qwen3MoeMLP", "varying"] in [row[:3] for row in rows]
    placement = ["tp=Shard(0)", "fsdp=Shard(0)"]
    assert ["model.embed_tokens.weight", "64", "x", "16", "float32", *placement, "frozen", "-", "root"] in rows
    assert [
        "model.layers.{0..2}.self_attn:output", "exit", "tp", "reduce_scatter(1)", "/", "all_gather", "131,072", "131,072",
        "786,432",
    ] in rows  # fmt: skip
    assert {"memory of one rank", "sent by one rank, each micro-batch"} <= set(lines)
    assert lines[-1] == "note: no train section: figures are for a micro-batch of 1 x 4096 tokens"


def test_a_terminal_gets_the_same_tables_drawn(capsys, recipe, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "240")
    text = run(capsys, recipe)
    assert "model.layers.{0..2}.self_attn" in text
    assert "─" in text


def test_json_is_the_plan_itself(capsys, recipe):
    found = plan_from_json(run(capsys, recipe, "--json", "--world", "8"))
    assert found.topology.dp_shard == 4
    assert found == make_plan(load_recipe(recipe, plugins=load_plugins()), world=8)


def test_explain_tells_one_name_in_full(capsys, recipe):
    assert run(capsys, recipe, "--explain", "model.layers.0.mlp.gate.weight").splitlines() == [
        "model.layers.0.mlp.gate.weight is a parameter of shape 4 x 16, float32",
        "  declared by: model.layers.0.mlp.gate: adapter qwen3_moe (hp-qwen3-moe 0.1.0), rule router",
        "  placement: tp=Replicate",
        "  gradient: tp=Partial, because it is replicated in a varying body (input hidden_states is Shard(0) on tp); "
        "the view completes it once",
        "  trainable: yes",
        "  init: normal, entry '*'",
        "  FSDP unit: model.layers.0, not wrapped",
    ]


def test_values_can_be_set_on_the_command_line(capsys, recipe):
    assert "tp=4 ep=1; 4 ranks" in run(capsys, recipe, "--set", "mesh.tp=4")
    assert "sequence parallel off" in run(capsys, recipe, "--set", "mesh.sequence_parallel=false")


def test_the_resolved_recipe_loads_again(capsys, recipe, tmp_path):
    text = run(capsys, recipe, "--print-config", "--set", "model.dtype=bf16")
    again = tmp_path / "again.yaml"
    again.write_text(text)
    plugins = load_plugins()
    assert load_recipe(again, plugins=plugins) == load_recipe(recipe, plugins=plugins, sets=["model.dtype=bfloat16"])


def test_the_resolved_recipe_needs_no_torch(recipe):
    code = "import sys; from hp_core.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "plan", recipe, "--print-config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.endswith("disabled: []\nFalse\n")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["--set", "mesh.tp=8"],
            "hp: error[HP502]: num_attention_heads (4) must be divisible by tp (8). --set mesh.tp=8, "
            "mesh: dp_replicate=1 dp_shard=1 pp=1 cp=1 tp=8 ep=1. fix: set mesh.tp to 4\n",
        ),
        (
            ["--explain", "model.layers.7.mlp"],
            "hp: error[HP525]: the plan has no module or parameter 'model.layers.7.mlp'; did you mean 'model.layers.1.mlp'?\n",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(capsys, recipe, argv, told):
    assert main(["plan", recipe, *argv]) == 1
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("world", ["0", "-2"])
def test_a_number_of_ranks_below_one_is_told_as_the_option_s_fault(capsys, recipe, world):
    assert main(["plan", recipe, "--world", world]) == 1
    assert capsys.readouterr().err == (f"hp: error[HP501]: the number of processes is {world}; expected 1 or more. --world\n")


@pytest.mark.parametrize(
    ("argv", "where"), [(["--world", "9999999998"], "--world"), (["--set", "mesh.dp_replicate=4999999999"], "{recipe}:5")]
)
def test_a_number_of_ranks_that_no_job_has_is_refused(capsys, recipe, argv, where):
    assert main(["plan", recipe, *argv]) == 1
    assert capsys.readouterr().err == (
        f"hp: error[HP501]: the number of processes is 9999999998; expected at most 1,048,576. {where.format(recipe=recipe)}\n"
    )


def test_planning_for_another_machine_is_told(capsys, recipe):
    told = "note: device is cuda, and this machine has none: the plan is for another one"
    assert told in run(capsys, recipe, "--set", "device=cuda").splitlines()
    assert "note: device" not in run(capsys, recipe)


def test_sections_are_asked_about_the_mesh_and_about_this_machine(capsys, recipe, tmp_path):
    pytest.importorskip("hp_trainer")
    sets = ["--set", "train.global_batch_size=6", "--set", "train.sequence_length=64", "--set", "data.source=text"]
    sets += ["--set", f"data.path={tmp_path}/no*.txt", "--set", f"data.tokenizer={tmp_path}/none.json"]
    lines = run(capsys, recipe, "--world", "4", *sets).splitlines()
    assert lines[-2:] == [
        f"note: data.path '{tmp_path}/no*.txt' names no file on this machine",
        f"note: data.tokenizer '{tmp_path}/none.json' names no file on this machine",
    ]
    assert main(["plan", recipe, "--world", "8", *sets]) == 1
    assert capsys.readouterr().err == (
        "hp: error[HP502]: train.global_batch_size (6) must be divisible by dp_replicate * dp_shard * train.micro_batch_size "
        "(4 * 1). --set train.global_batch_size=6. mesh: dp_replicate=1 dp_shard=4 pp=1 cp=1 tp=2 ep=1. "
        "fix: use a multiple of 4\n"
    )


def test_a_world_that_the_mesh_does_not_fit_names_the_line(capsys, recipe):
    assert main(["plan", recipe, "--world", "3"]) == 1
    assert capsys.readouterr().err == (
        "hp: error[HP501]: 3 processes cannot be divided by pp * dp_replicate * cp * tp = 1 * 1 * 1 * 2 = 2; "
        f"expected a multiple of 2. {recipe}:5. fix: start another number of processes, or change a degree\n"
    )


def test_two_outputs_at_once_are_a_usage_error(capsys, recipe):
    with pytest.raises(SystemExit) as stop:
        main(["plan", recipe, "--json", "--print-config"])
    assert stop.value.code == 2
