"""``hp plugins check``: a line per stage, from the metadata of a plugin to its code on the meta device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import attrs

from hp_core.cli.output import table, told
from hp_core.errors import HPError
from hp_core.plugins.availability import absent_for, extra_line
from hp_core.plugins.plugins import Plugins
from hp_core.plugins.record import Loaded, PluginRecord

STAGES = ("found", "metadata", "import", "hooks", "declarations", "resolve")
RESOLVE = STAGES.index("resolve")
SLOW_S = 1.0  # declarations that take longer are pointed out: every command waits for them


@attrs.frozen(kw_only=True)
class Report:
    """How far a plugin came: the line of each stage, the error that it failed with, and what was tried in the last one."""

    record: PluginRecord
    lines: tuple[str, ...]
    error: HPError | None = None
    notes: tuple[str, ...] = ()

    @property
    def fault(self) -> bool:
        """Whether somebody has to repair something: blocked and unavailable are normal."""
        return self.error is not None and self.record.status != "unavailable"


def check(chosen: Sequence[Loaded], *, plugins: Plugins, named: bool) -> int:
    """Print the report of every plugin in ``chosen`` and return 1 if one was asked for by name and cannot be used, else 0.

    Raises the last error, after printing the others, so that a failure ends like that of every other command.
    """
    reports = []
    for plugin in chosen:
        reports.append(report(plugin, plugins=plugins))
        print(text(reports[-1]), flush=True)
    errors = [found.error for found in reports if found.error is not None and (found.fault or named)]
    with told(json=False) as others:
        others += errors
        if others:
            raise others.pop()
    return int(named and any(found.record.status != "ok" for found in reports))


def report(plugin: Loaded, *, plugins: Plugins) -> Report:
    """Return the report of one plugin; stage 5 is run if it has passed the others."""
    record = plugin.record
    if record.status == "blocked":
        return Report(record=record, lines=(f"blocked: {record.reason}",))
    if record.error is not None:
        before = _passed(plugin)[: stage_of(record.error.code)]
        return Report(record=record, lines=(*before, _failed(record)), error=record.error, notes=_to_author(record.error))
    try:
        count, notes = _resolve(plugin, plugins=plugins)
    except HPError as error:
        failed = record.failed(error)
        return Report(record=failed, lines=(*_passed(plugin), _failed(failed)), error=error)
    counted = f"ok: {count} {'reference' if count == 1 else 'references'}"
    line = extra_line(record.distribution, absent_for(plugin))
    outcome = counted if record.status == "ok" else f"{record.status}: {record.reason}{line and f'. fix: {line}'}"
    return Report(record=record, lines=(*_passed(plugin), outcome), notes=tuple(notes))


def stage_of(code: str) -> int:
    """Return the stage in which loading fails with ``code``."""
    if code in ("HP301", "HP302"):
        return STAGES.index("import")
    return {"1": 0, "2": 1, "3": 3}.get(code[2], STAGES.index("declarations"))


def text(report: Report) -> str:
    """Return a report as it is printed; stages that were not reached are named as such."""
    record = report.record
    title = f"{record.name} ({record.distribution} {record.version})"
    lines = [*report.lines, *["not reached"] * (len(STAGES) - len(report.lines))]
    rows = [(f"{number} {stage}", line) for number, (stage, line) in enumerate(zip(STAGES, lines, strict=True))]
    return "\n".join([title, *table([*rows, *(("", note) for note in report.notes)], indent=2)])


def _passed(plugin: Loaded) -> list[str]:
    notes = [f"slow: more than {SLOW_S:g} s, and every hp command waits for it"] if plugin.seconds > SLOW_S else []
    notes += [f"it changes what is everybody's, and that is put back: {', '.join(plugin.undone)}"] if plugin.undone else []
    note = f"ok, but {'; '.join(notes)}" if notes else "ok"
    count = len(plugin.declarations)
    return ["ok", "ok", note, "ok", f"ok: {count} {'declaration' if count == 1 else 'declarations'}"]


def _to_author(error: HPError) -> tuple[str, ...]:
    """Return what the author of a plugin can do where the error's fix is for those who only use it."""
    return ("or, in your own plugin: give what it declares a name that nobody has",) if error.code == "HP401" else ()


def _failed(record: PluginRecord) -> str:
    return f"{record.status}: {record.code} {record.reason}"


def _resolve(plugin: Loaded, *, plugins: Plugins) -> tuple[int, list[str]]:
    """Run stage 5: return how many references were loaded, and what was tried on meta. Prints go to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        from hp_core.testing.meta import check_on_meta  # torch
        from hp_core.testing.resolve import resolve

        return resolve(plugin), check_on_meta(plugin, plugins=plugins)
