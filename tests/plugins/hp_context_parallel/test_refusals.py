"""What a recipe may not ask of attention over cp: each is told before any weight is loaded, with the legal values."""

from __future__ import annotations

import types
from typing import Any

import pytest

import hp_components.plugin
import hp_qwen3_moe.plugin
import hp_trainer.plugin
from hp_context_parallel import plugin
from hp_core.contracts import Protocol, hookimpl
from hp_core.errors import PlanError
from hp_core.models.build import build
from hp_core.plugins.load import plugins_from
from hp_core.recipe.load import recipe_from_dict

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def plain() -> list[Protocol]:
    """A protocol of somebody else that can do nothing but causal attention."""
    return [Protocol(kind="cp", name="plain", implementation="hp_context_parallel.allgather:AllGather")]


def planned(cp: Any, *, degree: int = 2, config: dict[str, Any] | None = None, **sections: Any) -> Any:
    """Return the plan of a small model with these settings."""
    other = types.ModuleType("acme")
    vars(other).update(HP_API=1, hp_protocols=hookimpl(plain))
    plugins = plugins_from(plugin, other, hp_components.plugin, hp_qwen3_moe.plugin, hp_trainer.plugin)
    data = {
        "model": {"adapter": "qwen3_moe", "config": {**CONFIG, **(config or {})}},
        "mesh": {"cp": degree},
        "protocols": {"cp": cp},
        **sections,
    }
    recipe = recipe_from_dict(data, plugins=plugins)
    return build(recipe, mesh=recipe.topology().view("dense")).plan


WINDOW = {"use_sliding_window": True, "sliding_window": 16}
REFUSED = [
    (
        {"cp": "plain", "data": {"packing": True}},
        "HP580: protocol cp:plain cannot do packed attention, which data.packing asks for; expected a protocol that can; it "
        "can do causal. recipe: protocols.cp. fix: set protocols.cp to allgather or hybrid or ring or ulysses",
    ),
    (
        {"cp": "plain", "config": WINDOW},
        "HP580: protocol cp:plain cannot do sliding attention, which model.config.sliding_window asks for; expected a protocol "
        "that can; it can do causal. recipe: protocols.cp. fix: set protocols.cp to allgather or hybrid or ring or ulysses",
    ),
    (
        {"cp": {"name": "ulysses", "sequence_layout": "zigzag"}},
        "HP580: protocol cp:ulysses cannot work on a zigzag sequence; expected contiguous. recipe: "
        "protocols.cp.sequence_layout. fix: leave protocols.cp.sequence_layout out",
    ),
    (
        {"cp": {"name": "ring", "outer": "ring"}},
        "HP580: protocol cp:ring has no outer axis, but protocols.cp.outer is set; expected null. recipe: protocols.cp.outer. "
        "fix: leave protocols.cp.outer out",
    ),
    (
        {"cp": "hybrid", "degree": 4},
        "HP580: protocol cp:hybrid cuts cp (4) into cp_outer and cp_inner, and protocols.cp.inner is null; expected one of "
        "1, 2, 4. recipe: protocols.cp. fix: protocols: {cp: {name: hybrid, inner: 2}}",
    ),
    (
        {"cp": {"name": "hybrid", "inner": 8}, "degree": 8},
        "HP502: 4 query heads and 2 key-value heads on a tp rank cannot be shared among protocols.cp.inner (8) ranks; expected "
        "protocols.cp.inner one of 1, 2, 4: query heads divisible by it, key-value heads divisible or a divisor. recipe: "
        "protocols.cp.inner. fix: set protocols.cp.inner to 4, or choose another protocol",
    ),
    (
        {"cp": "ring", "config": {"attention_dropout": 0.1}},
        "HP524: attention_dropout is 0.1 with tp=1 cp=2; expected 0 with tp or cp: ranks would drop different things than one "
        "process. recipe: model.config.attention_dropout. fix: set attention_dropout to 0",
    ),
]


@pytest.mark.parametrize(("asked", "text"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_what_cannot_be_is_refused_with_what_can(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as error:
        planned(**asked)
    found = str(error.value)
    assert found == text or (text.endswith("...") and found.startswith(text[:-3]))


@pytest.mark.parametrize(
    ("cp", "degree", "sequence", "planned_length"),
    [("ring", 2, 33, 36), ("ring", 2, 32, 32), ("ulysses", 2, 33, 34), ("allgather", 1, 33, 33)],
)
def test_the_trainer_s_rows_are_planned_as_long_as_cp_can_cut(cp: str, degree: int, sequence: int, planned_length: int) -> None:
    train = {"sequence_length": sequence, "global_batch_size": 2}
    assert planned(cp, degree=degree, train=train).sequence == planned_length


def test_native_attention_is_bound_and_gets_its_kernels() -> None:
    plan = planned({"name": "hybrid", "inner": 2, "outer": "allgather"}, degree=4, config=WINDOW, data={"packing": True})
    (attention,) = [b for b in plan.boundaries if b.fqn == "model.layers.0.self_attn"]
    assert attention.parallel.binding_kind == "cp"
    assert {k.op for k in plan.kernels if k.fqn == attention.fqn} == {"attention_with_lse"}
    protocol = plan.protocol("cp")
    assert (protocol.name, protocol.sequence_layout, protocol.options) == ("hybrid", "zigzag", {"outer": "allgather"})
    assert dict(protocol.sub_axes) == {"cp_outer": 2, "cp_inner": 2}
