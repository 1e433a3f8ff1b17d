"""Declarations of a protocol whose class leaves methods out."""

from hp_core.contracts import Protocol, hookimpl

HP_API = 1


@hookimpl
def hp_protocols():
    return [Protocol(kind="ep", name="acme", implementation="acme_unfinished_protocol.code:Acme")]
