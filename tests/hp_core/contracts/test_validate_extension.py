"""Kernels, precision schemes, recipe sections and commands: every way to get one wrong, word for word."""

from typing import Any

import pytest

from hp_core.contracts import Command, Kernel, PrecisionScheme, RecipeSection
from hp_core.contracts.validate import validate
from hp_core.errors import DeclarationError

NAME = "lower-case letters, digits and underscores, beginning with a letter"


def kernel(**fields: Any) -> Kernel:
    """Return a kernel with the least that is legal, and ``fields``."""
    return Kernel(**{"op": "rms_norm", "name": "fast", "device": "cpu", "implementation": "a:b", **fields})


def scheme(**fields: Any) -> PrecisionScheme:
    """Return a scheme with the least that is legal, and ``fields``."""
    return PrecisionScheme(**{"name": "mixed", "compute": "bfloat16", **fields})


def command(**fields: Any) -> Command:
    """Return a command with the least that is legal, and ``fields``."""
    return Command(**{"name": "train", "help": "Train a model", "main": "a:b", **fields})


LEGAL = [
    kernel(),
    kernel(requires=["torch_npu", "a.b"], condition="a:b"),
    scheme(),
    scheme(modules={"Router": "float32"}, roles={"norm": "float32"}, members=["fast"], implementation="a:b"),
    RecipeSection(name="train", schema="a:B"),
    command(),
    command(name="export-weights"),
]


@pytest.mark.parametrize("declaration", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_declaration_passes(declaration: Any) -> None:
    validate(declaration)


ILLEGAL = [
    (
        kernel(op="conv"),
        "kernel conv@fast: op is 'conv'; expected one of rms_norm, rotary, attention, attention_with_lse, grouped_matmul, "
        "swiglu, topk_gating, moe_permute, moe_unpermute, vocab_parallel_cross_entropy, embedding",
    ),
    (kernel(name="Fast"), f"kernel rms_norm@Fast: name is 'Fast'; expected {NAME}"),
    (kernel(device=""), f"kernel rms_norm@fast: device is ''; expected {NAME}"),
    (kernel(requires=["torch-npu"]), "kernel rms_norm@fast: requires holds 'torch-npu'; expected names of modules"),
    (scheme(name="bf16+fp32"), f"scheme 'bf16+fp32': name is 'bf16+fp32'; expected {NAME}"),
    (
        scheme(roles={"routing": "float32"}),
        "scheme 'mixed': a role is 'routing'; did you mean 'router'?; "
        "expected one of embedding, norm, attention, router, experts, mlp, head",
    ),
    (
        scheme(roles={"router": "fp8"}),
        "scheme 'mixed': the dtype of role 'router' is 'fp8'; expected one of float64, float32, bfloat16, float16, "
        "float8_e4m3fn, float8_e5m2",
    ),
    (
        scheme(compute="bfloat61"),
        "scheme 'mixed': compute is 'bfloat61'; did you mean 'bfloat16'?; expected one of float64, float32, bfloat16, float16, "
        "float8_e4m3fn, float8_e5m2",
    ),
    (
        scheme(modules={"Router": "fp8"}),
        "scheme 'mixed': the dtype of 'Router' is 'fp8'; expected one of float64, float32, bfloat16, float16, "
        "float8_e4m3fn, float8_e5m2",
    ),
    (scheme(members=["a", "a"]), "scheme 'mixed': members holds 'a' twice; expected each once"),
    (RecipeSection(name="Train", schema="a:B"), f"section 'Train': name is 'Train'; expected {NAME}"),
    (RecipeSection(name="mesh", schema="a:B"), "section 'mesh' is hp-core's own; expected another name"),
    (command(name="Train"), "command 'Train': name is 'Train'; expected lower-case letters, digits and hyphens"),
    (command(name="plugins"), "command 'plugins' is hp-core's own; expected another name"),
    (command(help=""), "command 'train': help is ''; expected a text"),
    (command(help="two\nlines"), "command 'train': help is 'two\\nlines'; expected one line"),
]


@pytest.mark.parametrize(("declaration", "message"), ILLEGAL, ids=[case[1][:60] for case in ILLEGAL])
def test_an_illegal_declaration_is_refused(declaration: Any, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate(declaration)
    assert caught.value.line == f"hp: error[HP402]: {message}"


@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        (kernel(implementation="x"), "kernel rms_norm@fast: implementation is 'x'"),
        (kernel(condition="x"), "kernel rms_norm@fast: condition is 'x'"),
        (scheme(implementation="x"), "scheme 'mixed': implementation is 'x'"),
        (RecipeSection(name="train", schema="x"), "section 'train': schema is 'x'"),
        (command(main="x"), "command 'train': main is 'x'"),
    ],
)
def test_a_reference_that_is_not_well_formed_is_refused(declaration: Any, named: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate(declaration)
    assert caught.value.line == f"hp: error[HP403]: {named}; expected a lazy reference, 'package.module:Attribute'"
