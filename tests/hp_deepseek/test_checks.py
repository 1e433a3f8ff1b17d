"""What a configuration of DeepSeek-V3 is refused for, text by text."""

from __future__ import annotations

import pytest

from hp_core.mesh.topology import Topology
from hp_deepseek.checks import ABOVE_ZERO, SIZES, check_config

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def problem(mesh=None, **config):
    (found,) = check_config({**CONFIG, **config}, mesh or Topology())
    assert found.code is None
    return found.what, found.expected, found.where, found.fix


@pytest.mark.parametrize("value", [0, -2])
@pytest.mark.parametrize("key", SIZES)
def test_a_size_below_one_is_refused(key, value):
    assert problem(**{key: value}) == (f"{key} is {value}", "at least 1", f"model.config.{key}", "")


@pytest.mark.parametrize("key", ["n_group", "topk_group", "num_experts_per_tok", "v_head_dim"])
def test_sizes_that_hugging_face_would_let_be_null_are_refused(key):
    assert problem(**{key: None})[:2] == (f"{key} is null", "an integer")


@pytest.mark.parametrize("key", ABOVE_ZERO)
def test_what_divides_or_scales_is_above_zero(key):
    assert problem(**{key: 0.0}) == (f"{key} is 0.0", "above 0", f"model.config.{key}", "")


def test_everything_cannot_be_dropped():
    assert problem(attention_dropout=1.0)[:2] == ("attention_dropout is 1.0", "0 or more, below 1")


@pytest.mark.parametrize(
    ("key", "value", "others", "expected", "fix"),
    [
        ("q_lora_rank", 0, {}, "at least 1, or null for queries without a latent", ""),
        ("first_k_dense_replace", -1, {}, "how many layers are dense: 0 or more", ""),
        (
            "num_key_value_heads",
            4,
            {},
            "num_attention_heads (8): every head has its own keys and values",
            "set it to null",
        ),
        ("qk_rope_head_dim", 7, {}, "an even number: rotary embeddings turn pairs", ""),
        ("n_group", 3, {}, "a divisor of n_routed_experts (16)", ""),
        ("n_group", 16, {"topk_group": 8}, "at most 8: a group's score is of its two best experts", ""),
        ("topk_group", 5, {}, "at most n_group (4)", ""),
        ("num_experts_per_tok", 9, {}, "at most 8, the experts of topk_group (2) groups", ""),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(key, value, others, expected, fix):
    assert problem(**{key: value, **others}) == (f"{key} is {value}", expected, f"model.config.{key}", fix)


def test_a_dense_model_needs_no_groups_that_fit():
    assert check_config({**CONFIG, "n_group": 3, "first_k_dense_replace": 4}, Topology()) == []


@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "llama3"])
def test_positions_may_be_scaled_by_rules_that_look_at_positions_alone(rope):
    assert check_config({**CONFIG, "rope_parameters": {"rope_type": rope}}, Topology()) == []


def test_positions_that_depend_on_the_length_are_refused():
    assert problem(rope_parameters={"rope_type": "dynamic"}) == (
        "rope_parameters.rope_type is dynamic",
        "one of default, linear, yarn, llama3: others change with the length of what a rank sees",
        "model.config.rope_parameters.rope_type",
        "",
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("scoring_func", "softmax", "sigmoid: the router's scores are sigmoids"),
        ("topk_method", "greedy", "noaux_tc: experts are chosen by corrected scores within the best groups"),
        ("moe_layer_freq", 2, "1: every layer after the dense ones is a mixture of experts"),
    ],
)
def test_what_the_model_s_code_does_not_read_may_only_say_what_it_does(key, value, expected):
    assert problem(**{key: value}) == (f"{key} is {value}", expected, f"model.config.{key}", "leave it out")
    assert check_config({**CONFIG, key: expected.partition(":")[0] if key != "moe_layer_freq" else 1}, Topology()) == []


def test_the_router_loss_that_the_model_itself_would_add_is_refused():
    assert problem(output_router_logits=True) == (
        "output_router_logits is true",
        "false: the loss component does not add the router's auxiliary loss",
        "model.config.output_router_logits",
        "leave it out; use loss.aux",
    )


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}])
def test_dropout_is_refused_where_ranks_share_a_sequence(mesh):
    assert check_config({**CONFIG, "attention_dropout": 0.1}, Topology(dp_shard=2)) == []
    what, expected, where, fix = problem(Topology(**mesh), attention_dropout=0.1)
    assert what == f"attention_dropout is 0.1 with tp={mesh.get('tp', 1)} cp={mesh.get('cp', 1)}"
    assert expected == "0 with tp or cp: ranks would drop different things than one process"
    assert (where, fix) == ("model.config.attention_dropout", "set attention_dropout to 0")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": None}, "num_attention_heads (6) must be divisible by tp (4)"),
        ({"vocab_size": 254}, "vocab_size (254) must be divisible by tp (4)"),
        ({"intermediate_size": 90}, "intermediate_size (90) must be divisible by tp (4)"),
        (
            {"moe_intermediate_size": 30},
            "moe_intermediate_size * n_shared_experts (30) must be divisible by tp (4)",
        ),
        ({"moe_intermediate_size": 30, "n_shared_experts": 2}, "moe_intermediate_size (30) must be divisible by tp (4)"),
    ],
)
def test_a_size_that_does_not_divide_is_named_with_the_mesh(config, told):
    topology = Topology(tp=4)
    first = check_config({**CONFIG, **config}, topology)[0]
    assert (first.code, first.what, first.where) == ("HP502", told, "mesh.tp")


def test_only_sizes_that_the_model_has_must_divide():
    dense, sparse = {"first_k_dense_replace": 4}, {"first_k_dense_replace": 0}
    assert check_config({**CONFIG, **dense, "moe_intermediate_size": 30}, Topology(tp=4)) == []
    assert check_config({**CONFIG, **sparse, "intermediate_size": 90}, Topology(tp=4)) == []
    whole = {"moe_intermediate_size": 30, "n_shared_experts": 2}
    assert check_config({**CONFIG, **whole}, Topology(tp=4, ep=4)) == []
