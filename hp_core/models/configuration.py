"""The model's Hugging Face configuration: read, checked key by key, and made; what it could say in vain is refused.

Hugging Face keeps whatever key it is given and checks types only, so a misspelt key, a private one that changes behaviour, or a
size of zero would be found late or never.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from hp_core.contracts.adapter import ModelAdapter
from hp_core.errors import HPError, PlanError
from hp_core.plugins.lazy import load
from hp_core.recipe.schema import Recipe

LARGEST = 2**24  # of any integer: more than any vocabulary, context or width there is
MOST_LAYERS = 10_000  # each is built, so many more would take hours to refuse
_LABELS = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "_commit_hash")
_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")  # older names that Hugging Face folds into rope_parameters
_UNTYPED = {
    "head_dim": (int,),
    "rope_theta": (int, float),
    "partial_rotary_factor": (int, float),
}  # not every class declares them
_HOW = ("return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder", "chunk_size_feed_forward")
_CHOSEN = ("attn_implementation", "experts_implementation")  # the core chooses these
_WRAPPED = re.compile(
    r"^.*?[Vv]alidation error for .*?: (?:\w+(?:Error|Exception): )?"
)  # how Hugging Face's classes tell theirs
_READ = re.compile(r"""config\.([a-z]\w*)|getattr\((?:self\.)?config, ["'](\w+)["']""")

Where = Callable[[str], str]  # a key -> where it is written


@attrs.frozen(kw_only=True)
class Given:
    """The keys that a configuration was given, where each is written, and whether a file of somebody else's gave them."""

    values: Mapping[str, Any]
    where: Where
    published: bool

    @classmethod
    def of(cls, recipe: Recipe) -> Given:
        """Return what the recipe gives: its mapping, key by key; or a ``config.json``, which is named."""
        values, written = recipe.model.config or {}, None if recipe.origin is None else recipe.origin.find("model.config")
        if recipe.model.checkpoint is not None:
            base = f"{recipe.where('model.checkpoint')}, config.json"
        elif written is not None and isinstance(written.value, str):
            base = f"{written.where}, {written.value}"
        else:
            return cls(values=values, where=lambda key: recipe.where(f"model.config.{key}".rstrip(".")), published=False)
        return cls(values=values, where=lambda key: f"{base}: {key}" if key else base, published=True)

    def blame(self, text: str) -> str:
        """Return where the key is written that an error's text quotes, or whose value it quotes; else all of it."""
        quoted = re.findall(r"['`]([^'`]+)['`]", text)
        keys = [name for name in quoted if name in self.values]
        keys += [key for key, value in self.values.items() if isinstance(value, str) and value in quoted]
        return self.where(keys[0] if keys else "")


def configure(adapter: ModelAdapter, recipe: Recipe) -> Any:
    """Return the Hugging Face configuration object of the recipe's model.

    HP524: of another model than the adapter's, or of quantised weights; HP542: a key that nothing reads, that says how to
    compute, that contradicts another, or a number that cannot be one of its kind; and whatever Hugging Face refuses.
    """
    given = Given.of(recipe)
    check_kind(adapter, given)
    check_keys(adapter, given)
    check_aliases(adapter, given)
    check_numbers(adapter, given)
    return make_config(adapter, given.values, where=given.blame)


def make_config(adapter: ModelAdapter, values: Mapping[str, Any], *, where: Where) -> Any:
    """Return the Hugging Face configuration object of ``values``; HP542, in one line, for whatever it refuses.

    ``where``: the text of an error -> where its cause is written.
    """
    known = {name: value for name, value in values.items() if name not in _LABELS}
    with quiet(), as_one_line(where):
        return load(adapter.config_class)(**known)


def check_kind(adapter: ModelAdapter, given: Given) -> None:
    """Raise HP524 for a configuration of another model than the adapter's, or of quantised weights: neither is built."""
    asked, types = given.values.get("model_type"), adapter.hf_model_types
    if asked is not None and types and asked not in types:
        fix = "choose the adapter of that model, or leave model_type out"
        raise PlanError(
            "HP524", f"model_type is {asked!r}", expected=" or ".join(types), where=given.where("model_type"), fix=fix
        )
    named = given.values.get("architectures")
    known = adapter.architectures or (adapter.model_class.rpartition(":")[2],)
    if named is not None and (not isinstance(named, list | tuple) or not all(name in known for name in named)):
        raise PlanError(
            "HP524",
            f"architectures is {named!r}",
            expected=f"a list of {' or '.join(known)}",
            where=given.where("architectures"),
            fix="choose the adapter of that model, or leave architectures out",
        )
    if given.values.get("quantization_config") is not None:
        raise PlanError(
            "HP524",
            "quantization_config is set, and the model would be built without it",
            expected="a configuration of weights that are not quantised",
            where=given.where("quantization_config"),
            fix="leave it out and use weights that are not quantised",
        )


def check_keys(adapter: ModelAdapter, given: Given) -> None:
    """Raise HP542 for a key that nothing reads, or that says how the model computes, which the core decides.

    A file of somebody else's may hold keys that this model does not read, unless they are nearly one that it does, and the
    ``auto_map`` of code that is not run.
    """
    config = load(adapter.config_class)()
    names = read_keys(adapter, config)
    for key, value in given.values.items():
        private = key.startswith("_") and key not in _LABELS
        if private or key in _CHOSEN or (key == "auto_map" and not given.published):
            raise PlanError(
                "HP542",
                f"the configuration sets {key!r}",
                expected="keys that describe the model, since attention, experts and code are chosen by the recipe",
                where=given.where(key),
                fix="leave it out",
            )
        if key in _HOW and value is not None and value != getattr(config, key, value):
            raise PlanError(
                "HP542",
                f"{key} is {value!r}",
                expected=f"{getattr(config, key)!r}: it says how the model is called, not what it is",
                where=given.where(key),
                fix="leave it out",
            )
        if key not in names and not hasattr(config, key) and key != "auto_map":
            _refuse_unknown(adapter, key, names, given)


def read_keys(adapter: ModelAdapter, config: Any) -> set[str]:
    """Return the keys that the configuration declares, or that the code of the model or of the configuration reads."""
    names = {*_LABELS, *_ROPE, *config.to_dict(), *_fields(config), *getattr(config, "attribute_map", {})}
    for reference in (adapter.model_class, adapter.config_class):
        module = sys.modules[load(reference).__module__]
        with contextlib.suppress(OSError, TypeError):  # a module without source reads what it declares
            names.update(a or b for a, b in _READ.findall(inspect.getsource(module)))
    return names


def _refuse_unknown(adapter: ModelAdapter, key: str, names: set[str], given: Given) -> None:
    missing = names - set(given.values)  # a key that is near one that is there too is another key
    close = difflib.get_close_matches(key, sorted(missing), n=1, cutoff=0.88)
    if given.published and not close:
        return
    meant = f"; did you mean {close[0]!r}?" if close else ""
    what = f"the configuration of {adapter.name} has no key {key!r}{meant}"
    raise PlanError("HP542", what, where=given.where(key), fix="correct it or leave it out: nothing reads it")


def check_aliases(adapter: ModelAdapter, given: Given) -> None:
    """Raise HP542 where a value is given under two names that disagree: Hugging Face would take one of them silently."""
    pairs = dict(getattr(load(adapter.config_class), "attribute_map", {}))
    for alias, name in pairs.items():
        _check_pair(given, alias, given.values.get(alias), name, given.values.get(name))
    rope = given.values.get("rope_parameters") or given.values.get("rope_scaling") or {}
    if isinstance(rope, Mapping):
        _check_pair(given, "rope_theta", given.values.get("rope_theta"), "rope_parameters.rope_theta", rope.get("rope_theta"))


def _check_pair(given: Given, one: str, value: Any, other: str, second: Any) -> None:
    if value is not None and second is not None and value != second:
        raise PlanError(
            "HP542",
            f"{one} is {value!r} and {other} is {second!r}, but they are two names of one value",
            expected="one of them",
            where=given.where(one),
            fix=f"leave {one} or {other} out",
        )


def check_numbers(adapter: ModelAdapter, given: Given) -> None:
    """Raise HP542 for a number that cannot be one of its kind: not a number, negative, infinite, or larger than any model's.

    The adapter knows more about its own keys: which may be 0, and what divides what.
    """
    plain = load(adapter.config_class)().to_dict()
    for path, value in _numbers(given.values):
        key = path.rpartition(".")[2]
        if value == -1 and key in plain and plain[key] is None:
            continue  # "no such token" in older files
        legal = _legal(key, value)
        if legal is not None:
            raise PlanError("HP542", f"{key} is {value!r}", expected=legal, where=given.where(path), fix=f"correct {key}")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every number with its path, rotary parameters among them, and whatever stands in the place of one."""
    nested = {name: value for name, value in values.items() if name in ("rope_parameters", "rope_scaling")}
    for prefix, group in (("", values), *((f"{name}.", value) for name, value in nested.items() if isinstance(value, Mapping))):
        for key, value in group.items():
            if type(value) in (int, float) or (key in _UNTYPED and value is not None):
                yield prefix + key, value


def _legal(key: str, value: Any) -> str | None:
    """Return what ``value`` should have been, or None if it may be what it is."""
    if type(value) not in _UNTYPED.get(key, (int, float)):
        return "an integer" if _UNTYPED[key] == (int,) else "a number"
    if not math.isfinite(value):
        return "a finite number"
    if value < 0 or (value == 0 and key == "rope_theta"):
        return "above 0" if key == "rope_theta" else "0 or more"
    if key == "num_hidden_layers" and value > MOST_LAYERS:
        return f"at most {MOST_LAYERS:,}"
    return f"at most {LARGEST:,}" if isinstance(value, int) and value > LARGEST else None


def _fields(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()


@contextlib.contextmanager
def as_one_line(where: Where) -> Iterator[None]:
    """Turn what Hugging Face raises into HP542; ``where``: the text of the error -> where its cause is written."""
    try:
        yield
    except HPError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        wrapped = _WRAPPED.search(text)
        told = text[wrapped.end() :] if wrapped else f"{type(error).__name__}: {text}"
        raise PlanError("HP542", f"the model cannot be built: {told}", where=where(text), fix="correct model.config") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what Hugging Face logs while it builds a model that is never run as it is."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
