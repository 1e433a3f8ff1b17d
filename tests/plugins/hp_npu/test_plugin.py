"""What hp-npu declares: kernels for every operator it has, that can be planned without torch_npu, and where each applies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hp_core.plugins.lazy import load, module_exists
from hp_core.plugins.load import plugins_from
from hp_npu import plugin

KERNELS = {kernel.op: kernel for kernel in plugin.hp_kernels()}
OPS = "attention attention_with_lse grouped_matmul moe_permute moe_unpermute rms_norm rotary swiglu"


def test_every_operator_of_torch_npu_is_a_kernel_that_auto_takes_on_an_npu() -> None:
    assert sorted(KERNELS) == OPS.split()
    for kernel in KERNELS.values():
        assert (kernel.name, kernel.device, kernel.requires, kernel.automatic) == ("npu", "npu", ("torch_npu",), True)


def test_the_references_load_without_torch_npu() -> None:
    for kernel in KERNELS.values():
        assert load(kernel.implementation).__name__ == kernel.op
        assert callable(load(kernel.condition or ""))


def test_declarations_and_conditions_import_no_torch() -> None:
    code = "import sys, hp_npu.plugin, hp_npu.conditions; print({'torch', 'torch_npu', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_without_torch_npu_the_plugin_is_unavailable_and_its_kernels_stay_listed() -> None:
    plugins = plugins_from(plugin)
    (record,) = plugins.records
    assert module_exists("torch_npu") or (record.status, record.reason) == ("unavailable", "torch_npu is not installed")
    assert set(plugins.kernels) == {f"{op}:npu" for op in KERNELS}


@pytest.mark.skipif(module_exists("torch_npu"), reason="torch_npu is installed")
def test_a_kernel_that_is_called_without_torch_npu_says_what_is_missing() -> None:
    """In a process of its own: here the tests of the kernels may have registered the operators."""
    code = "import torch; from hp_npu.kernels.swiglu import swiglu; swiglu(torch.ones(1, 2), torch.ones(1, 2))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert printed.splitlines()[-1] == (
        "hp_core.errors.PlanError: HP571: the operator npu_swiglu belongs to torch_npu, which this machine does not have. "
        "fix: pip install 'hp-npu[npu]' on a machine with CANN, or choose another kernel"
    )


def applies(op: str, *, attributes: dict[str, int] | None = None, **changes: Any) -> bool:
    facts = {
        "fqn": "m",
        "device": "npu",
        "compute": "bfloat16",
        "batch": 2,
        "sequence": 4096,
        "tp": 1,
        "parameters": {},
        "attributes": attributes or {},
        **changes,
    }
    found: bool = load(KERNELS[op].condition or "")(facts)
    return found


@pytest.mark.parametrize("op", sorted(KERNELS))
def test_a_component_that_states_nothing_is_taken_in_every_dtype_but_float64(op) -> None:
    assert [dtype for dtype in ("float64", "float32", "bfloat16", "float16") if applies(op, compute=dtype)] == [
        "float32",
        "bfloat16",
        "float16",
    ]


DEEPSEEK = {"num_heads": 128, "plain_dim": 128, "rotary_dim": 64, "latent_dim": 512, "value_dim": 128}
LIMITS = [  # operator, facts that are legal, facts that are not
    ("attention", {"attributes": {"head_dim": 768}}, {"attributes": {"head_dim": 769}}),
    ("attention", {"attributes": {"num_heads": 256}}, {"attributes": {"num_heads": 257}}),
    ("attention", {"attributes": {"num_heads": 512}, "tp": 2}, {"attributes": {"num_heads": 512}}),
    ("attention", {"attributes": DEEPSEEK}, {"attributes": {**DEEPSEEK, "latent_dim": 705}}),
    ("attention", {"attributes": DEEPSEEK}, {"attributes": {**DEEPSEEK, "value_dim": 193}}),
    ("attention", {"sequence": 2**20}, {"sequence": 2**20 + 1}),
    ("attention_with_lse", {"attributes": {"head_dim": 752}}, {"attributes": {"head_dim": 753}}),
    ("rotary", {"attributes": {"head_dim": 894}}, {"attributes": {"head_dim": 896}}),
    ("rotary", {"attributes": {"head_dim": 128}}, {"attributes": {"head_dim": 127}}),
    ("rotary", {"attributes": {**DEEPSEEK, "head_dim": 900}}, {"attributes": {**DEEPSEEK, "rotary_dim": 63}}),
    ("rotary", {"batch": 999}, {"batch": 1000}),
    ("rotary", {"attributes": {"num_heads": 1000}, "tp": 2}, {"attributes": {"num_heads": 1000}}),
    ("grouped_matmul", {"attributes": {"num_experts": 1024}}, {"attributes": {"num_experts": 1025}}),
    ("grouped_matmul", {"parameters": {"w": (4, 2**16 - 1, 8)}}, {"parameters": {"w": (4, 2**16, 8)}}),
    ("moe_permute", {"attributes": {"top_k": 512}}, {"attributes": {"top_k": 513}}),
    ("moe_unpermute", {"sequence": 2**20, "attributes": {"top_k": 7}}, {"sequence": 2**20, "attributes": {"top_k": 8}}),
]


@pytest.mark.parametrize(("op", "legal", "illegal"), LIMITS)
def test_the_limits_of_the_operators_are_conditions(op, legal, illegal) -> None:
    assert applies(op, **legal)
    assert not applies(op, **illegal)
