"""Which kernel computes each operator of each component: the recipe's word, else the device's. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from hp_core.contracts import Kernel, KernelPlan
from hp_core.contracts.kernel import ANY, OPS
from hp_core.errors import PlanError, suggest
from hp_core.mesh.topology import Topology
from hp_core.planner.describe import Described
from hp_core.planner.families import BASELINE
from hp_core.plugins.lazy import call
from hp_core.recipe.schema import Recipe

AUTO = "auto"


@attrs.frozen(kw_only=True)
class Wish:
    """A kernel's name, or ``auto``, for one operator in modules that match ``match``; ``key`` is its place in the recipe."""

    op: str
    match: str
    name: str
    key: str
    reason: str


def plan_kernels(
    described: Sequence[Described], *, variants: Mapping[str, str], recipe: Recipe, topology: Topology
) -> tuple[KernelPlan, ...]:
    """Return the kernel of every operator of every component, in module order; ``variants``: FQN -> the member there.

    Attention of the model's own class computes the operator too, through Hugging Face's registry; without a kernel for it, by
    torch's fused attention. Attention that is bound over cp computes ``attention_with_lse`` in place of ``attention``.
    The first pattern of ``kernels`` that matches a module decides; without one, ``auto``. HP101: no plugin provides the kernel;
    HP514: no such operator; HP527: a wish that no component has use for; HP570: the kernel is for another device, its condition
    does not hold, or ``auto`` finds none, or several of one preference.
    """
    wishes = read_wishes(recipe)
    served: set[Wish] = set()
    found = []
    for item in described:
        operators = _operators(item, variants)
        for op in operators:
            wish = next((w for w in wishes if w.op == op and fnmatch.fnmatchcase(item.info.fqn, w.match)), None)
            served |= {wish} if wish is not None else set()
            facts = facts_of(item, recipe=recipe, topology=topology)
            needed = item.family is not None or op in item.kernels or wish is not None
            if _runs(op, item, operators, topology=topology) and (needed or _provided(op, facts=facts, recipe=recipe)):
                found.append(choose_kernel(op, wish, facts=facts, recipe=recipe))
    for wish in wishes:
        if wish not in served:
            raise _useless(wish, [item for item in described if wish.op in _operators(item, variants)], recipe)
    return tuple(found)


def _operators(item: Described, variants: Mapping[str, str]) -> tuple[str, ...]:
    if item.family is not None:
        return item.family.operators(variants.get(item.info.fqn, BASELINE))
    own = ("attention",) if item.role == "attention" else ()
    return tuple(dict.fromkeys((*own, *item.kernels)))


def _runs(op: str, item: Described, operators: Sequence[str], *, topology: Topology) -> bool:
    """Return whether the module computes the operator on this mesh: attention has two, and one of them is over cp."""
    if not {"attention", "attention_with_lse"} <= set(operators):
        return True
    over_cp = topology.cp > 1 and item.parallel is not None and item.parallel.binding_kind == "cp"
    return op != ("attention" if over_cp else "attention_with_lse")


def _provided(op: str, *, facts: Mapping[str, Any], recipe: Recipe) -> bool:
    """Return whether ``auto`` has a kernel to choose from."""
    devices = (ANY, facts["device"])
    return any(k.automatic and k.device in devices and _applies(k, facts) for k in _kernels(op, recipe))


def read_wishes(recipe: Recipe) -> tuple[Wish, ...]:
    """Return what ``kernels`` says, one entry per operator and pattern, in order. HP514 for an operator that does not exist."""
    wishes: list[Wish] = []
    for op, value in ({} if isinstance(recipe.kernels, str) else recipe.kernels).items():
        key = f"kernels.{op}"
        if op not in OPS:
            what = f"kernels names the operator {op!r}{suggest(op, OPS)}"
            raise PlanError("HP514", what, expected=f"one of {', '.join(OPS)}", where=recipe.where(key))
        if isinstance(value, str):
            wishes.append(Wish(op=op, match="*", name=value, key=key, reason=key))
            continue
        for pattern, name in value.items():
            wishes.append(Wish(op=op, match=pattern, name=name, key=key, reason=f"{key} of {pattern}"))
    return tuple(wishes)


def facts_of(item: Described, *, recipe: Recipe, topology: Topology) -> dict[str, Any]:
    """Return what a kernel's ``condition`` may look at; shapes are global, before tp cuts them."""
    batch, sequence = recipe.tokens
    return {
        "fqn": item.info.fqn,
        "device": recipe.device,
        "compute": recipe.compute,
        "batch": batch,
        "sequence": sequence,
        "tp": topology.tp,
        "parameters": {name: tensor.shape for name, tensor in item.info.parameters.items()},
        "attributes": dict(item.info.attributes),
    }


def choose_kernel(op: str, wish: Wish | None, *, facts: Mapping[str, Any], recipe: Recipe) -> KernelPlan:
    """Return the one kernel of ``op`` for a module with these ``facts``; a named one is taken or refused, never exchanged."""
    if wish is None or wish.name == AUTO:
        kernel, reason = _automatic(op, facts=facts, recipe=recipe)
    else:
        kernel, reason = _named(wish, facts=facts, recipe=recipe), wish.reason
    return KernelPlan(
        fqn=facts["fqn"],
        op=op,
        name=kernel.name,
        device=kernel.device,
        implementation=kernel.implementation,
        requires=kernel.requires,
        reason=reason,
    )


def _named(wish: Wish, *, facts: Mapping[str, Any], recipe: Recipe) -> Kernel:
    where = recipe.where(wish.key)
    kernel: Kernel = recipe.declarations.provided("kernel", f"{wish.op}:{wish.name}", where=where).declaration
    if kernel.device not in (ANY, facts["device"]):
        raise PlanError(
            "HP570",
            f"the kernel {wish.op}@{wish.name} is for {kernel.device}, the recipe's device is {facts['device']}",
            expected=f"a kernel for {facts['device']}",
            where=where,
            fix=f"one of {', '.join(_names(wish.op, recipe, facts['device']))}",
        )
    if not _applies(kernel, facts):
        raise PlanError(
            "HP570",
            f"the kernel {wish.op}@{wish.name} does not apply to {facts['fqn']}: its condition {kernel.condition} is false",
            expected="a kernel that applies",
            where=where,
            fix=f"one of {', '.join(_names(wish.op, recipe, facts['device']))}, for the modules it does not apply to",
        )
    return kernel


def _automatic(op: str, *, facts: Mapping[str, Any], recipe: Recipe) -> tuple[Kernel, str]:
    """Return the device's most preferred kernel, else one for any device, and why: which better ones do not apply."""
    every = [k for k in _kernels(op, recipe) if k.automatic]
    passed = ""
    for device, reason in ((facts["device"], f"auto: for {facts['device']}"), (ANY, "auto: for any device")):
        own = sorted((k for k in every if k.device == device), key=lambda k: -k.preference)
        fitting = [kernel for kernel in own if _applies(kernel, facts)]
        best = [kernel for kernel in fitting if kernel.preference == fitting[0].preference]
        if len(best) > 1:
            names = ", ".join(kernel.name for kernel in best)
            what = f"auto finds several kernels of {op} for {facts['fqn']} on {device}: {names}"
            raise PlanError("HP570", what, expected="one", where=recipe.where("kernels"), fix=f"kernels: {{{op}: NAME}}")
        better = own[: own.index(best[0])] if best else own
        passed += "".join(f"; {kernel.name} does not apply ({kernel.condition})" for kernel in better)
        if best:
            return best[0], reason + passed
    raise PlanError(
        "HP570",
        f"auto finds no kernel of {op} for {facts['fqn']} on {facts['device']}",
        expected="a plugin that provides one",
        where=recipe.where("kernels"),
    )


def _applies(kernel: Kernel, facts: Mapping[str, Any]) -> bool:
    return kernel.condition is None or bool(call(kernel.condition, facts, gives=object))


def _kernels(op: str, recipe: Recipe) -> list[Kernel]:
    table = recipe.declarations.kernels
    return [table[key].declaration for key in sorted(table) if table[key].declaration.op == op]


def _names(op: str, recipe: Recipe, device: str) -> list[str]:
    return [kernel.name for kernel in _kernels(op, recipe) if kernel.device in (ANY, device)] or ["none is installed"]


def _useless(wish: Wish, users: Sequence[Described], recipe: Recipe) -> PlanError:
    if users:
        what = f"no component that computes {wish.op} matches {wish.match!r}, or an earlier pattern takes it"
        return PlanError("HP527", what, expected=f"a module such as {users[0].info.fqn}", where=recipe.where(wish.key))
    what = f"kernels names {wish.op}, but no component of the model computes it through a kernel"
    fix = "replace the modules by a component that does (hp families list), or leave the key out"
    return PlanError("HP527", what, expected="an operator in use", where=recipe.where(wish.key), fix=fix)
