"""Load a recipe: read it, apply ``--set``, structure every section, and refuse what cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from hp_core.contracts import ModuleFamily
from hp_core.errors import DeclarationError, HPError, PlanError
from hp_core.plugins.lazy import load
from hp_core.plugins.load import without
from hp_core.plugins.plugins import Plugins
from hp_core.recipe.model import resolve_model
from hp_core.recipe.overrides import Override
from hp_core.recipe.schema import CORE_SECTIONS, PluginSwitches, Protocols, Recipe
from hp_core.recipe.sets import apply_sets
from hp_core.recipe.structure import fields, illegal, misfit, missing, structure, unknown_key
from hp_core.recipe.tree import Node, in_recipe, join, node_of, parse_yaml
from hp_core.recipe.trust import check_trust, is_path, with_trusted
from hp_core.recipe.unsupported import check_supported
from hp_core.recipe.values import show

_ARGUMENT_KINDS = {"int": int, "float": float, "bool": bool, "str": str}


def load_recipe(path: str | Path, *, plugins: Plugins, sets: Sequence[str] = (), trust: Sequence[str] = ()) -> Recipe:
    """Return the recipe in the file ``path`` with ``sets`` (``"a.b=value"``) applied, checked against ``plugins``.

    ``trust``: packages of which overrides may name code as ``package.module:Attribute``. Relative paths in the file start
    from its folder. Raises an :class:`HPError` with the dotted path and the line: HP510 to HP518, HP503 for a degree, HP101
    and HP104 for names that no plugin provides.

    Example::

        load_recipe("tiny.yaml", plugins=load_plugins(), sets=["mesh.tp=2", "train.steps=10"])
    """
    base = Path(path).absolute().parent
    tree = parse_yaml(_read(path), where=lambda line: f"{path}:{line}", base=base)
    return _recipe(apply_sets(tree, sets=sets), plugins=plugins, trust=trust)


def recipe_from_dict(
    data: Mapping[str, Any],
    *,
    plugins: Plugins,
    base: Path | None = None,
    trust: Sequence[str] = (),
    where: Callable[[str], str] = in_recipe,
) -> Recipe:
    """Return the recipe given as plain data; ``base`` is where relative paths start (the working directory).

    ``trust`` and errors as :func:`load_recipe`; ``where`` names a place from its dotted path: ``recipe: mesh.tp`` by default.
    """
    return _recipe(node_of(data, base=(base or Path()).absolute(), where=where), plugins=plugins, trust=trust)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError("HP511", f"{str(path)!r} is not UTF-8 text", expected="a YAML file") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PlanError("HP510", f"the recipe {str(path)!r} cannot be read: {reason}", expected="a YAML file") from error


def _recipe(root: Node, *, plugins: Plugins, trust: Sequence[str]) -> Recipe:
    if root.value is None or root.value == {}:
        raise PlanError("HP516", "the recipe is empty", expected="a mapping with at least model", where=root.where)
    if not isinstance(root.value, dict):
        raise misfit(root, Mapping[str, Any], path="the recipe")
    sections = root.value
    hints = {field.key: field.kind for field in fields(Recipe)}
    core = {name: structure(sections[name], hints[name], path=name) for name in CORE_SECTIONS if name in sections}
    usable = _without(plugins, core.get("plugins", PluginSwitches()), root=root)
    others = {name: _section(name, node, plugins=usable) for name, node in sections.items() if name not in CORE_SECTIONS}
    if "model" not in core:
        raise missing("model", hints["model"], where=root.where)
    core["model"] = resolve_model(core["model"], node=sections["model"])
    trusted = check_trust(trust)
    usable = with_trusted(usable, core.get("overrides", ()), trusted=trusted, root=root)
    core["overrides"] = tuple(
        _checked(override, node=root.find(f"overrides.{index}"), path=f"overrides.{index}", plugins=usable)
        for index, override in enumerate(core.get("overrides", ()))
    )
    recipe = Recipe(**core, sections=others, declarations=usable, trusted=trusted, origin=root)
    return _check(recipe)


def _check(recipe: Recipe) -> Recipe:
    check_supported(recipe)
    _ = recipe.adapter
    _check_scheme(recipe)
    _check_protocols(recipe)
    if recipe.mesh.dp_shard != -1:
        recipe.topology()
    for index, pattern in enumerate(recipe.freeze):
        if not pattern:
            where = recipe.where(f"freeze.{index}")
            raise PlanError("HP514", f"freeze.{index} is ''", expected="a pattern that is not empty", where=where)
    return recipe


def _check_protocols(recipe: Recipe) -> None:
    """Raise HP101 for a protocol that nobody provides, whatever the degree; the default may be missing until it is used."""
    defaults = Protocols()
    for kind in ("cp", "ep"):
        name = getattr(recipe.protocols, kind).name
        if name != getattr(defaults, kind).name:
            recipe.declarations.protocol(kind, name, where=recipe.where(f"protocols.{kind}"))


def _check_scheme(recipe: Recipe) -> None:
    """Raise unless ``precision.scheme`` is registered (HP101) and agrees with ``precision.compute`` (HP514)."""
    name, compute = recipe.precision.scheme, recipe.precision.compute
    if name is None:
        return
    scheme = recipe.declarations.scheme(name, where=recipe.where("precision.scheme"))
    if compute not in (None, scheme.compute):
        what = f"precision.compute is {compute}, but the scheme {name!r} computes in {scheme.compute}"
        raise PlanError("HP514", what, expected="one of the two", where=recipe.where("precision.compute"))


def _without(plugins: Plugins, switches: PluginSwitches, *, root: Node) -> Plugins:
    """Return the plugins with the disabled ones marked as blocked; HP102 for a name that is not installed."""
    if not switches.disabled:
        return plugins
    return without(plugins, switches.disabled, source="plugins.disabled", where=root.find("plugins.disabled").where)


def _section(name: str, node: Node, *, plugins: Plugins) -> Any:
    """Return the object of a section that a plugin owns."""
    declared = plugins.section(name, where=node.where)
    if declared is None:
        raise unknown_key(name, (*CORE_SECTIONS, *plugins.sections), path="", where=node.where)
    cls = load(declared.schema)
    if not (isinstance(cls, type) and attrs.has(cls)):
        what = f"the recipe section {name!r} is declared as {declared.schema!r}"
        raise DeclarationError("HP402", what, expected="an attrs class")
    try:
        return structure(node, cls, path=name)
    except HPError:
        raise
    except Exception as error:
        what = f"the class of the recipe section {name!r} ({declared.schema}) fails: {type(error).__name__}: {error}"
        raise DeclarationError(
            "HP402", what, expected="HPError or ValueError for an illegal value", where=node.where
        ) from error


def _checked(override: Override, *, node: Node, path: str, plugins: Plugins) -> Override:
    """Return the override with its arguments checked against the family that it names."""
    replace = override.replace
    if override.scheme is not None:
        plugins.scheme(override.scheme, where=node.find("scheme").where)
    if replace is None:
        return override
    named, key = node.find("replace.implementation"), join(path, "replace.implementation")
    _refuse_protocol(replace.implementation, node=named, path=key, plugins=plugins)
    family = plugins.family(replace.implementation, where=named.where)
    if is_path(replace.implementation):
        return override  # its arguments are checked against the signature, once the code is imported
    given = node.find("replace.with").children() if replace.arguments else []
    arguments = {str(key): _argument(str(key), item, path=join(path, "replace.with"), family=family) for key, item in given}
    return attrs.evolve(override, replace=attrs.evolve(replace, arguments=arguments))


def _refuse_protocol(name: str, *, node: Node, path: str, plugins: Plugins) -> None:
    """Raise HP514 for a protocol in place of a family: it takes no module's place, and the recipe names it elsewhere."""
    kinds = [kind for kind in ("cp", "ep") if plugins.knows("protocol", f"{kind}:{name}")]
    if plugins.knows("family", name) or not kinds:
        return
    raise PlanError(
        "HP514",
        f"{path} is {show(node.plain())}, a protocol over {' and '.join(kinds)}",
        expected="the name of a registered family: a protocol says how modules communicate and takes no module's place",
        where=node.where,
        fix=f"protocols: {{{', '.join(f'{kind}: {name}' for kind in kinds)}}}",
    )


def _argument(key: str, node: Node, *, path: str, family: ModuleFamily) -> Any:
    known = {**family.arguments, **{name: spec.type for name, spec in family.selectors.items()}}
    if key not in known:
        raise unknown_key(key, known, path=path, where=node.where)
    value = structure(node, _ARGUMENT_KINDS.get(str(known[key]), Any), path=join(path, key))
    choices = family.selectors[key].choices if key in family.selectors else None
    if choices is not None and value not in choices:
        raise illegal(node, join(path, key), expected=f"one of {', '.join(map(str, choices))}")
    return value
