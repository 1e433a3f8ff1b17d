"""What a plugin may add to the recipe and to the command line."""

from __future__ import annotations

import attrs

CORE_SECTIONS = (
    "model",
    "mesh",
    "precision",
    "fsdp",
    "recompute",
    "device",
    "compile",
    "protocols",
    "kernels",
    "overrides",
    "freeze",
    "loss",
    "plugins",
)  # sections of the recipe that are hp-core's own
CORE_COMMANDS = ("completion", "doctor", "families", "kernels", "plan", "plugins", "protocols", "verify")  # hp-core's own


@attrs.frozen(kw_only=True)
class RecipeSection:
    """A top-level section of the recipe: ``schema`` is the lazy torch-free attrs class that it is structured into.

    The class may define three methods: ``unsupported() -> dict[str, str]``, keys whose value nothing implements, and why;
    ``problems(topology) -> list[Problem]``, what cannot be on that mesh, with the recipe's key in ``where``; both are refused.
    ``absent() -> list[str]``, what it names and this machine lacks: ``hp plan`` says so, since it may plan for another one.
    """

    name: str
    schema: str


@attrs.frozen(kw_only=True)
class Command:
    """A command ``hp NAME``: one line of help and the lazy ``main(argv: list[str], plugins: Plugins) -> int``."""

    name: str
    help: str
    main: str
