"""Declarations that contradict their contract."""

from hp_core.contracts import ModuleFamily, SelectorSpec, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [
        ModuleFamily(
            name="acme_norm",
            baseline="acme_illegal_family.norm:Norm",
            selectors={"parallel": SelectorSpec(type="bool", default=False)},
        )
    ]
