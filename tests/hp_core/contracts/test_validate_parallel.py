"""How a module says that it communicates, and protocols: every way to get it wrong, word for word."""

from typing import Any

import pytest

from hp_core.contracts import ModuleShardingSpec, NativeParallelBindingRequest, ParallelModuleSpec, Partial, Protocol
from hp_core.contracts.validate import validate
from hp_core.contracts.validate_parallel import validate_member, validate_parallel
from hp_core.errors import DeclarationError

NAME = "lower-case letters, digits and underscores, beginning with a letter"


def spec(**fields: Any) -> ParallelModuleSpec:
    """Return a spec with the least that is legal, and ``fields``."""
    return ParallelModuleSpec(**{"protocol": "acme", **fields})


def protocol(**fields: Any) -> Protocol:
    """Return a protocol with the least that is legal, and ``fields``."""
    return Protocol(**{"kind": "cp", "name": "ring", "implementation": "acme.ring:Ring", **fields})


def request(**fields: Any) -> NativeParallelBindingRequest:
    """Return a request with the least that is legal, and ``fields``."""
    return NativeParallelBindingRequest(**{"match": ("*.mlp",), "parallel": spec(), "sharding": ModuleShardingSpec(), **fields})


LEGAL = [
    spec(),
    spec(stages={"dispatch": ("hidden", "indices"), "combine": ()}, binding_kind="mesh", validate="a:b"),
    spec(binding_kind="ep", validate="a:b", validate_materialized="a:c", options={"num_experts": 8}),
    protocol(),
    protocol(sequence_layout="zigzag", sub_axes=["cp_outer", "cp_inner"], masks=["causal", "packed"], backends=["gloo"]),
    protocol(kind="ep", name="dedup"),
    request(),
]


@pytest.mark.parametrize("declaration", LEGAL, ids=range(len(LEGAL)))
def test_a_legal_declaration_passes(declaration: Any) -> None:
    validate(declaration)


ILLEGAL = [
    (spec(protocol=""), "parallel spec '': protocol is ''; expected a text"),
    (spec(version=0), "parallel spec 'acme': version is 0; expected an integer, 1 or more"),
    (spec(version=True), "parallel spec 'acme': version is True; expected an integer, 1 or more"),
    (spec(binding_kind="tp"), "parallel spec 'acme': binding_kind is 'tp'; expected one of none, cp, ep, mesh"),
    (spec(stages={"a b": ()}), "parallel spec 'acme': stages holds 'a b'; expected a Python name"),
    (
        spec(stages={"run": ("x", "x")}),
        "parallel spec 'acme': the arguments of stage 'run' holds 'x' twice; expected each once",
    ),
    (spec(options={"num experts": 1}), "parallel spec 'acme': options holds 'num experts'; expected a Python name"),
    (
        spec(binding_kind="cp"),
        "parallel spec 'acme': binding_kind is 'cp' and validate is None; expected a validate reference",
    ),
    (
        spec(binding_kind="ep", validate="a:b"),
        "parallel spec 'acme': options['num_experts'] is None; expected an integer, 1 or more",
    ),
    (protocol(kind="tp"), "protocol tp:ring: kind is 'tp'; expected one of cp, ep"),
    (protocol(name="Ring"), f"protocol cp:Ring: name is 'Ring'; expected {NAME}"),
    (protocol(version="1"), "protocol cp:ring: version is '1'; expected an integer, 1 or more"),
    (
        protocol(sequence_layout="striped"),
        "protocol cp:ring: sequence_layout is 'striped'; expected one of None, contiguous, zigzag",
    ),
    (protocol(sub_axes=["a", "a"]), "protocol cp:ring: sub_axes holds 'a' twice; expected each once"),
    (
        protocol(masks=["casual"]),
        "protocol cp:ring: a mask is 'casual'; did you mean 'causal'?; expected one of causal, sliding, packed",
    ),
    (protocol(masks=["causal", "causal"]), "protocol cp:ring: masks holds 'causal' twice; expected each once"),
    (protocol(backends=[""]), "protocol cp:ring: an entry of backends is ''; expected a text"),
    (
        protocol(kind="ep", sequence_layout="zigzag"),
        "protocol ep:ring: sequence_layout is 'zigzag'; expected nothing, since only cp protocols cut the sequence",
    ),
    (
        protocol(kind="ep", sub_axes=["a"]),
        "protocol ep:ring: sub_axes is ('a',); expected nothing, since only cp protocols cut the sequence",
    ),
    (request(match=()), "binding request for nothing: match is empty; expected at least one pattern"),
    (
        request(parallel=spec(version=0)),
        "parallel_spec of binding request for *.mlp: version is 0; expected an integer, 1 or more",
    ),
    (
        request(sharding=ModuleShardingSpec(params={"w": {"tp": Partial()}})),
        "params['w'] is Partial on tp; expected Shard or Replicate, since a parameter is never a summand. "
        "binding request for *.mlp",
    ),
]


@pytest.mark.parametrize(("declaration", "message"), ILLEGAL, ids=[case[1][:60] for case in ILLEGAL])
def test_an_illegal_declaration_is_refused(declaration: Any, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate(declaration)
    assert caught.value.line == f"hp: error[HP402]: {message}"


@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        (spec(validate="x"), "parallel spec 'acme': validate is 'x'"),
        (spec(validate_materialized="x"), "parallel spec 'acme': validate_materialized is 'x'"),
        (protocol(implementation="x"), "protocol cp:ring: implementation is 'x'"),
    ],
)
def test_a_reference_that_is_not_well_formed_is_refused(declaration: Any, named: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate(declaration)
    assert caught.value.line == f"hp: error[HP403]: {named}; expected a lazy reference, 'package.module:Attribute'"


def test_the_error_names_the_class_that_has_the_spec() -> None:
    with pytest.raises(DeclarationError) as caught:
        validate_parallel(spec(version=0), where="acme.experts:Experts")
    assert caught.value.line == (
        "hp: error[HP402]: parallel_spec of acme.experts:Experts: version is 0; expected an integer, 1 or more"
    )


METHODS = {"forward": ("hidden",), "dispatch": ("hidden", "indices"), "bind_parallel": ("binding",)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stages": {"dispatch": ("indices",), "forward": ()}},
        {"binding_kind": "mesh", "validate": "a:b"},
    ],
)
def test_a_class_that_keeps_its_spec_passes(fields: dict[str, Any]) -> None:
    validate_member(spec(**fields), methods=METHODS, where="Experts")


@pytest.mark.parametrize(
    ("found", "methods", "message"),
    [
        (
            spec(stages={"combine": ()}),
            METHODS,
            "the stage 'combine' is no method; expected a method (bind_parallel, dispatch, forward)",
        ),
        (spec(stages={"combine": ()}), {}, "the stage 'combine' is no method; expected a method (there is none)"),
        (
            spec(stages={"dispatch": ("weights",)}),
            METHODS,
            "the stage 'dispatch' does not take 'weights'; expected hidden, indices",
        ),
        (
            spec(binding_kind="mesh", validate="a:b"),
            {"bind_parallel": ("mesh",)},
            "binding_kind is 'mesh'; expected a method bind_parallel(binding)",
        ),
        (spec(version=0), METHODS, "version is 0; expected an integer, 1 or more"),
    ],
)
def test_a_class_that_breaks_its_spec_is_refused(
    found: ParallelModuleSpec, methods: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(DeclarationError) as caught:
        validate_member(found, methods=methods, where="Experts")
    assert caught.value.line == f"hp: error[HP402]: parallel_spec of Experts: {message}"


def test_a_spec_of_another_type_is_refused() -> None:
    with pytest.raises(DeclarationError) as caught:
        validate_member({"protocol": "acme"}, methods=METHODS, where="Experts")  # type: ignore[arg-type]
    assert caught.value.line == ("hp: error[HP402]: parallel_spec of Experts is a dict; expected a ParallelModuleSpec")
