"""The blocks of a transformer against the Hugging Face modules they replace: outputs and every gradient, promoted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from block_cases import CASES, B, Case, H, S, angles, attend, built, deepseek_config, qwen_config, results
from torch import nn
from transformers import PretrainedConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from hp_components.gqa_attention import GQAAttention
from hp_components.mla_attention import MLAAttention
from hp_components.rms_norm import RMSNorm
from hp_components.swiglu_mlp import SharedExpert, SwiGLUMLP
from hp_components.topk_router import SigmoidRouter, TopKRouter
from hp_core.errors import PlanError
from hp_core.models.replace_checks import check_candidate


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_hugging_faces(case: Case) -> None:
    make, component, arguments, call = case
    theirs = built(make)
    gradients, outputs = results(theirs, call)
    ours = component(module=theirs, **arguments)
    found_gradients, found_outputs = results(ours, call)
    assert found_gradients.keys() == gradients.keys()
    for found, expected in zip((*found_outputs, *found_gradients.values()), (*outputs, *gradients.values()), strict=True):
        scale = float(expected.double().abs().max()) or 1.0
        assert float((found.double() - expected.double()).abs().max()) <= 1e-9 * scale


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_components_may_take_the_place_of_their_source(case: Case) -> None:
    make, component, arguments, _ = case
    with torch.device("meta"):
        theirs = make().eval()
        check_candidate(theirs, component(module=theirs, **arguments), transforms={}, where="here")


@pytest.mark.parametrize("window", [1, 3, S])
def test_a_sliding_window_is_hugging_faces(window) -> None:
    theirs = built(lambda: qwen.Qwen3MoeAttention(qwen_config(use_sliding_window=True, sliding_window=window), 0))
    expected = results(theirs, attend(16, window))
    ours = GQAAttention(module=theirs)
    assert ours.sliding_window == window
    for found, wanted in zip(results(ours, attend(16))[0].values(), expected[0].values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_leaves_the_rest_of_the_head(interleaved) -> None:
    """Angles half as wide as the head: rotating nothing (zero turns) must equal no rotation."""
    ours = GQAAttention(module=built(CASES["qwen attention"][0]), interleaved=interleaved)
    hidden = torch.randn(B, S, H, dtype=torch.float64)
    none = (torch.ones(1, S, 8, dtype=torch.float64), torch.zeros(1, S, 8, dtype=torch.float64))
    wide = (torch.ones(1, S, 16, dtype=torch.float64), torch.zeros(1, S, 16, dtype=torch.float64))
    torch.testing.assert_close(ours(hidden, none)[0], ours(hidden, wide)[0], rtol=0, atol=1e-12)
    partial = attend(8)(ours, hidden)
    assert not torch.allclose(partial, ours(hidden, none)[0])


def test_without_angles_nothing_is_turned() -> None:
    ours = GQAAttention(module=built(CASES["qwen attention"][0]))
    hidden = torch.randn(B, S, H, dtype=torch.float64)
    none = (torch.ones(1, S, 16, dtype=torch.float64), torch.zeros(1, S, 16, dtype=torch.float64))
    torch.testing.assert_close(ours(hidden)[0], ours(hidden, none)[0], rtol=0, atol=1e-12)


def test_yarns_factor_scales_the_softmax() -> None:
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
    config = deepseek_config(rope_parameters=rope)
    assert MLAAttention(config=config).scaling == pytest.approx(deepseek.DeepseekV3Attention(config, 0).scaling)


def test_router_maths_is_fp32_whatever_arrives() -> None:
    router = TopKRouter(module=qwen.Qwen3MoeTopKRouter(qwen_config()).to(torch.bfloat16))
    logits, weights, indices = router(torch.randn(5, H, dtype=torch.bfloat16))
    assert (logits.dtype, weights.dtype, indices.dtype) == (torch.float32, torch.float32, torch.int64)


def test_the_correction_bias_is_the_very_buffer_and_stays_fp32() -> None:
    theirs = deepseek.DeepseekV3TopkRouter(deepseek_config())
    ours = SigmoidRouter(module=theirs)
    assert ours.e_score_correction_bias is theirs.e_score_correction_bias
    assert ours.e_score_correction_bias.dtype == torch.float32


def test_dropout_acts_while_training_only() -> None:
    theirs = built(lambda: qwen.Qwen3MoeAttention(qwen_config(attention_dropout=0.5), 0))
    hidden = torch.randn(B, S, H, dtype=torch.float64)
    training, evaluating = GQAAttention(module=theirs.train()), GQAAttention(module=theirs.eval())
    assert (training.training, evaluating.training) == (True, False)
    assert not torch.equal(attend(16)(training, hidden), attend(16)(training, hidden))
    assert torch.equal(attend(16)(evaluating, hidden), attend(16)(evaluating, hidden))


def with_child(name: str, child: nn.Module | None) -> nn.Module:
    module = qwen.Qwen3MoeAttention(qwen_config(), 0)
    module._modules[name] = child
    return module


class OwnLinear(nn.Linear):
    """A linear layer that may compute something else."""


KEEP = "fix: keep the original module"


def gates() -> nn.Module:
    return nn.ModuleDict({"gate_proj": nn.Linear(1, 1), "up_proj": nn.Linear(1, 1), "act_fn": nn.SiLU()})


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {  # what makes it, what it has, what is expected
    "a layer norm": (lambda: RMSNorm(module=nn.LayerNorm(4)), "rms_norm: a bias", "a norm without bias"),
    "no weight": (
        lambda: RMSNorm(module=nn.RMSNorm(4, elementwise_affine=False)),
        "rms_norm: no weight",
        "a parameter weight with 1 dims",
    ),
    "no epsilon": (
        lambda: RMSNorm(module=nn.PReLU(4)),
        "rms_norm: no epsilon",
        "variance_epsilon, eps or epsilon",
    ),
    "torch's own epsilon, which depends on the dtype": (
        lambda: RMSNorm(module=nn.RMSNorm(4)),
        "rms_norm: no epsilon",
        "variance_epsilon, eps or epsilon",
    ),
    "another activation": (
        lambda: SwiGLUMLP(config=qwen_config(hidden_act="gelu")),
        "swiglu_mlp: activation 'gelu'",
        "'silu'",
    ),
    "a module with another activation": (
        lambda: SwiGLUMLP(module=qwen.Qwen3MoeMLP(qwen_config(hidden_act="relu"))),
        "swiglu_mlp: activation 'ReLU'",
        "'silu'",
    ),
    "no down projection": (
        lambda: SharedExpert(module=gates()),
        "shared_expert: no down_proj",
        "gate_proj, up_proj, down_proj",
    ),
    "another projection": (
        lambda: GQAAttention(module=with_child("k_proj", OwnLinear(H, H))),
        "gqa_attention: k_proj of class OwnLinear",
        "a torch.nn.Linear",
    ),
    "one norm": (
        lambda: GQAAttention(module=with_child("k_norm", None)),
        "gqa_attention: q_norm alone",
        "q_norm and k_norm, or neither",
    ),
    "a norm over all heads": (
        lambda: GQAAttention(module=with_child("k_norm", nn.RMSNorm(H))),
        "gqa_attention: k_norm of shape (32,)",
        "(16,), one norm for every head",
    ),
    "no latent": (
        lambda: MLAAttention(module=deepseek_without("kv_b_proj")),
        "mla_attention: no kv_b_proj",
        "q_a_proj, q_a_layernorm, q_b_proj, kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj",
    ),
    "no top-k": (
        lambda: TopKRouter(module=nn.Linear(H, 8, bias=False)),
        "topk_router: no top_k",
        "top_k on the module or in its configuration",
    ),
}


def deepseek_without(name: str) -> nn.Module:
    module = deepseek.DeepseekV3Attention(deepseek_config(), 0)
    del module._modules[name]
    return module


@pytest.mark.parametrize(("make", "what", "expected"), REFUSED.values(), ids=REFUSED)
def test_a_module_that_computes_something_else_is_refused(make, what, expected) -> None:
    component, _, found = what.partition(": ")
    with pytest.raises(PlanError) as caught:
        make()
    assert str(caught.value) == f"HP541: {component} cannot replace a module with {found}; expected {expected}. {KEEP}"


@pytest.mark.parametrize(
    ("make", "what", "scoring"),
    [
        (lambda: TopKRouter(module=deepseek.DeepseekV3TopkRouter(deepseek_config())), "a", "sigmoid"),
        (lambda: SigmoidRouter(module=qwen.Qwen3MoeTopKRouter(qwen_config())), "no", "softmax"),
    ],
)
def test_a_router_of_other_scores_is_told_its_selector(make, what, scoring) -> None:
    with pytest.raises(PlanError) as caught:
        make()
    assert caught.value.code == "HP541"
    assert f"a module with {what} e_score_correction_bias" in caught.value.what
    assert caught.value.fix == f"with: {{scoring: {scoring}}}"


NO_MASK = "build the model with attn_implementation='hp', which passes none"
CALLS = {
    "a mask": ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "a dense attention mask (1, 1, 2, 2) is passed", NO_MASK),
    "a cache": ({"cache": object()}, "a cache is passed (object)", "pass use_cache=False"),
    "a cache by its older name": ({"past_key_values": object()}, "a cache is passed (object)", "pass use_cache=False"),
    "no causality": ({"is_causal": False}, "the attention is not causal", "a causal language model"),
    "a soft cap": ({"softcap": 30.0}, "softcap is passed", "a model without it"),
}


@pytest.mark.parametrize(("options", "what", "fix"), CALLS.values(), ids=CALLS)
def test_a_call_that_attention_cannot_honour_is_refused(options, what, fix) -> None:
    attention = GQAAttention(config=PretrainedConfig(hidden_size=H, num_attention_heads=2, num_key_value_heads=1))
    with pytest.raises(PlanError) as caught:
        attention(torch.zeros(1, S, H), angles(16), **options)
    assert str(caught.value) == f"HP554: {what}; expected causal attention over whole rows. gqa_attention. fix: {fix}"
