"""What is known about one plugin, and what it declared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from hp_core.errors import HPError
from hp_core.plugins import kinds

Status = Literal["ok", "blocked", "conflict", "incompatible", "unavailable", "broken"]

STATUS_OF: dict[str, Status] = {
    "HP103": "conflict",
    "HP105": "conflict",
    "HP201": "incompatible",
    "HP202": "unavailable",
    "HP312": "incompatible",
    "HP401": "conflict",
}  # every other code of the stages makes a plugin broken
FAULTS = ("broken", "conflict", "incompatible")  # somebody has to repair something; the other statuses are normal


@attrs.frozen(kw_only=True)
class PluginRecord:
    """One plugin: where it comes from, whether it can be used, and what it provides.

    - ``name``: the entry point's name. ``distribution`` / ``version`` / ``path`` / ``editable``: what brought it.
    - ``core``: the range of hp-core that its metadata asks for; ``api``: its ``HP_API``; None where unknown.
    - ``status``, and unless it is ok ``code`` and ``reason``: the first stage that failed.
    - ``fix``: how to use a blocked plugin again, and how to repair another, where there is a line for it.
    - ``provides``: ``"family grouped_experts"``, ``"kernel rms_norm@npu"``, sorted.
    - ``error``: the whole error behind a bad status.
    """

    name: str
    distribution: str
    version: str
    path: str = ""
    editable: bool = False
    core: str | None = None
    api: int | None = None
    status: Status = "ok"
    code: str | None = None
    reason: str | None = None
    fix: str = ""
    provides: tuple[str, ...] = ()
    error: HPError | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def label(self) -> str:
        """``plugin 'acme_moe' (acme-hp 2.0)``, as errors name it."""
        return f"plugin {self.name!r} ({self.distribution} {self.version})"

    @property
    def usable(self) -> bool:
        """Whether its declarations take part: a kernel's missing library or a clash of one name leaves the rest usable."""
        return self.code == "HP401" or (self.code is None and self.status in ("ok", "unavailable"))

    def failed(self, error: HPError) -> PluginRecord:
        """Return this record with the status that ``error`` means."""
        reason = error.what.rstrip(".")
        for owner in (f"{self.label}: ", f"{self.label} ", f"plugin {self.name!r} "):
            reason = reason.removeprefix(owner)
        if error.expected:
            reason += f"; expected {error.expected}"
        return attrs.evolve(
            self, status=STATUS_OF.get(error.code, "broken"), code=error.code, reason=reason, fix=error.fix, error=error
        )


@attrs.frozen(kw_only=True)
class Provided:
    """A declaration, the plugin that it comes from, and the file and line of the hook that returned it."""

    declaration: Any
    plugin: PluginRecord
    place: str = attrs.field(default="", eq=False)

    @property
    def author(self) -> str:
        """``plugin 'acme_moe' (acme-hp 2.0), declared in acme_hp/plugin.py:8``: whose fault a wrong declaration is."""
        return self.plugin.label + (f", declared in {self.place}" if self.place else "")


@attrs.frozen(kw_only=True)
class Loaded:
    """A plugin after its own stages: its record, its declarations as ``(kind, declaration)``, and its plan checks.

    ``places``: kind of declaration -> file and line of its hook. ``seconds``: how long its declarations took, which is added to
    the start of every command. ``undone``: what they changed in the process and was put back.
    """

    record: PluginRecord
    declarations: tuple[tuple[str, Any], ...] = ()
    checks: tuple[Callable[..., Any], ...] = ()
    places: Mapping[str, str] = attrs.field(factory=dict, eq=False)
    seconds: float = attrs.field(default=0.0, eq=False)
    undone: tuple[str, ...] = attrs.field(default=(), eq=False)

    def failed(self, error: HPError) -> Loaded:
        """Return this plugin with the status that ``error`` means; what it declared stays known."""
        return attrs.evolve(self, record=self.record.failed(error))


def described(record: PluginRecord, declarations: tuple[tuple[str, Any], ...]) -> PluginRecord:
    """Return ``record`` with ``provides`` filled from what the plugin declared."""
    provides = tuple(sorted(f"{kind} {kinds.label(kind, item)}" for kind, item in declarations))
    return attrs.evolve(record, provides=provides)
