"""Registration of model adapters: every way to get one wrong, word for word."""

from typing import Any

import pytest

from hp_core.contracts import FlowRule, Init, LayoutRule, ModelAdapter, Replacement, Stack
from hp_core.contracts.validate import validate
from hp_core.errors import DeclarationError

NAME = "lower-case letters, digits and underscores, beginning with a letter"
NORM = LayoutRule(name="norm", module_class="Norm", provider="acme.layout:norm")


def adapter(**fields: Any) -> ModelAdapter:
    """Return an adapter with the least that is legal, and ``fields``."""
    return ModelAdapter(**{"name": "acme", "model_class": "acme.model:Model", "config_class": "acme.model:Config", **fields})


def flow(producer: Any, consumer: Any, view: Any = None) -> ModelAdapter:
    """Return an adapter with one flow entry."""
    return adapter(residual="acme.layout:residual", flow=[FlowRule(producer=producer, consumer=consumer, view=view)])


def replacing(**fields: Any) -> ModelAdapter:
    """Return an adapter with one replacement."""
    return adapter(
        replacements=[Replacement(**{"match": "lm_head", "implementation": "loss", "source_type": "Linear", **fields})]
    )


LEGAL = [
    adapter(),
    adapter(
        hf_model_types=["acme", "acme-2"],
        architectures=["AcmeForCausalLM"],
        requires={"transformers": ">=5.20,<6", "torch": "~=2.13"},
    ),
    adapter(layout=[NORM], counts="acme.layout:counts"),
    flow("@input", "model.embed:input"),
    flow("model.layers.{i}.mlp:output", "@residual", "unflatten_tokens"),
    flow("lm_head:output", "@output"),
    flow(":output", "lm_head:hidden"),
    replacing(match=("a", "b"), arguments={"chunk": 4}),
    adapter(
        layout=[NORM],
        counts="acme.layout:counts",
        replacements=[Replacement(match="*", implementation="rms", source_type="Norm", layout_rule="norm")],
    ),
    adapter(init=[Init(match="*", kind="normal", config_key="initializer_range"), Init(match="*", kind="normal", value=0.02)]),
    adapter(init=[Init(match="*", kind="constant", value=1), Init(match="*", kind="computed", function="a:b")]),
    adapter(stack=Stack(layers="model.layers", before=["model.embed"], after=["lm_head"]), loss="lm_head", fp32=["*.gate"]),
    adapter(protocols=["cp:ring", "ep:dedup"]),
]


@pytest.mark.parametrize("declaration", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_adapter_passes(declaration: ModelAdapter) -> None:
    validate(declaration)


ILLEGAL = [
    (adapter(name="Acme-MoE"), f"adapter 'Acme-MoE': name is 'Acme-MoE'; expected {NAME}"),
    (adapter(hf_model_types=["a", "a"]), "adapter 'acme': hf_model_types holds 'a' twice; expected each once"),
    (adapter(architectures=[""]), "adapter 'acme': an entry of architectures is ''; expected a text"),
    (
        adapter(requires={"torch": "2.13 or so"}),
        "adapter 'acme': requires torch '2.13 or so'; expected a version range such as '>=5.20,<6'",
    ),
    (adapter(requires={"torch": None}), "adapter 'acme': requires torch None; expected a version range such as '>=5.20,<6'"),
    (
        adapter(layout=[NORM, NORM], counts="acme.layout:counts"),
        "adapter 'acme': the names of layout rules holds 'norm' twice; expected each once",
    ),
    (
        adapter(layout=[NORM]),
        "adapter 'acme': it has layout rules but no counts; expected a reference that says how many modules each rule matches",
    ),
    (
        adapter(layout=[LayoutRule(name="norm", module_class="N", provider="a:b", role="x")]),
        "adapter 'acme': layout rule 'norm': role is 'x'; expected one of None, embedding, norm, attention, router, experts, "
        "mlp, head",
    ),
    (
        replacing(layout_rule="head"),
        "adapter 'acme': replacement by 'loss': layout_rule is 'head'; expected one of None",
    ),
    (
        adapter(
            layout=[NORM],
            counts="acme.layout:counts",
            replacements=[Replacement(match="*", implementation="rms", source_type="Norm", layout_rule="nrom")],
        ),
        "adapter 'acme': replacement by 'rms': layout_rule is 'nrom'; did you mean 'norm'?; expected one of None, norm",
    ),
    (
        adapter(layout=[LayoutRule(name="norm", module_class="", provider="a:b")]),
        "adapter 'acme': layout rule 'norm': module_class is ''; expected a text",
    ),
    (
        flow("@output", "a:b"),
        "adapter 'acme': a flow's producer is '@output'; expected 'FQN pattern:port', @residual or @input",
    ),
    (flow("a:b", "@input"), "adapter 'acme': a flow's consumer is '@input'; expected 'FQN pattern:port', @residual or @output"),
    (flow("a.b", "a:b"), "adapter 'acme': a flow's producer is 'a.b'; expected 'FQN pattern:port', @residual or @input"),
    (flow("a:b", "a:b:c"), "adapter 'acme': a flow's consumer is 'a:b:c'; expected 'FQN pattern:port', @residual or @output"),
    (
        flow("l.{layer}.a:b", "l.{i}.a:b"),
        "adapter 'acme': a flow's producer 'l.{layer}.a:b' holds {layer}; expected {i} as the only placeholder",
    ),
    (
        flow("a:b", "c:d", "flatten"),
        "adapter 'acme': flow a:b -> c:d: view is 'flatten'; did you mean 'flatten_tokens'?; "
        "expected one of None, flatten_tokens, unflatten_tokens",
    ),
    (
        adapter(flow=[FlowRule(producer="@residual", consumer="a:b")]),
        "adapter 'acme': flow @residual -> a:b needs the residual stream's layout; expected residual to be declared",
    ),
    (
        adapter(flow=[FlowRule(producer="a:b", consumer="c:d")] * 2),
        "adapter 'acme': flow holds 'a:b -> c:d' twice; expected each once",
    ),
    (replacing(match=()), "adapter 'acme': replacement by 'loss': match is empty; expected at least one pattern"),
    (
        replacing(implementation="acme.loss:Loss"),
        f"adapter 'acme': replacement by 'acme.loss:Loss': implementation is 'acme.loss:Loss'; expected {NAME}",
    ),
    (replacing(source_type=None), "adapter 'acme': replacement by 'loss': source_type is None; expected a text"),
    (replacing(exact_type=1), "adapter 'acme': replacement by 'loss': exact_type is 1; expected True or False"),
    (replacing(arguments={"a b": 1}), "adapter 'acme': replacement by 'loss': arguments holds 'a b'; expected a Python name"),
    (
        adapter(init=[Init(match="*", kind="uniform")]),
        "adapter 'acme': init of '*': kind is 'uniform'; did you mean 'normal'?; expected one of normal, constant, computed",
    ),
    (
        adapter(init=[Init(match="*", kind="computed")]),
        "adapter 'acme': init of '*': kind is 'computed' and function is None; expected a function",
    ),
    (
        adapter(init=[Init(match="*", kind="normal", value=1.0, function="a:b")]),
        "adapter 'acme': init of '*': kind is 'normal' and function is 'a:b'; expected None",
    ),
    (
        adapter(init=[Init(match="*", kind="constant", config_key="std")]),
        "adapter 'acme': init of '*': kind is 'constant' and config_key is 'std'; expected None",
    ),
    (
        adapter(init=[Init(match="*", kind="normal")]),
        "adapter 'acme': init of '*': the standard deviation is 0.0; expected a positive value, or a config_key",
    ),
    (
        adapter(init=[Init(match="*", kind="constant", value="one")]),
        "adapter 'acme': init of '*': value is 'one'; expected a number",
    ),
    (adapter(fp32=["a", "a"]), "adapter 'acme': fp32 holds 'a' twice; expected each once"),
    (adapter(experts=[3]), "adapter 'acme': an entry of experts is 3; expected a text"),
    (adapter(isolated_subtrees=[" "]), "adapter 'acme': an entry of isolated_subtrees is ' '; expected a text"),
    (
        adapter(protocols=["ring"]),
        "adapter 'acme': protocols holds 'ring'; expected 'cp:NAME' or 'ep:NAME', or '*' as the name",
    ),
    (adapter(loss=""), "adapter 'acme': loss is ''; expected a text"),
    (adapter(stack=Stack(layers="")), "adapter 'acme': stack: layers is ''; expected a text"),
    (
        adapter(stack=Stack(layers="l", before=["a"], after=["a"])),
        "adapter 'acme': stack: before and after holds 'a' twice; expected each once",
    ),
]


@pytest.mark.parametrize(("declaration", "message"), ILLEGAL, ids=[case[1][:60] for case in ILLEGAL])
def test_an_illegal_adapter_is_refused(declaration: ModelAdapter, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate(declaration)
    assert caught.value.line == f"hp: error[HP402]: {message}"


@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        (adapter(model_class="Model"), "model_class is 'Model'"),
        (adapter(config_class=None), "config_class is None"),
        *(
            (adapter(**{field: "x"}), f"{field} is 'x'")
            for field in ("config_checks", "counts", "residual", "checkpoint", "flops")
        ),
        (adapter(layout=[LayoutRule(name="norm", module_class="N", provider="x")]), "layout rule 'norm': provider is 'x'"),
        (adapter(init=[Init(match="*", kind="computed", function="x")]), "init of '*': function is 'x'"),
    ],
)
def test_a_reference_that_is_not_well_formed_is_refused(declaration: ModelAdapter, named: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate(declaration)
    expected = "expected a lazy reference, 'package.module:Attribute'"
    assert caught.value.line == f"hp: error[HP403]: adapter 'acme': {named}; {expected}"


def test_a_layout_rule_is_checked_on_its_own_too() -> None:
    validate(NORM)
    with pytest.raises(DeclarationError) as caught:
        validate(LayoutRule(name="norm", module_class="Norm", provider="a:b", match=""))
    assert caught.value.line == "hp: error[HP402]: layout rule 'norm': match is ''; expected a text"
