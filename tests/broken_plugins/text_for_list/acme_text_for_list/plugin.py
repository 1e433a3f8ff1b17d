"""Declarations with a text where a list belongs."""

from hp_core.contracts import ModuleFamily, hookimpl

HP_API = 1


@hookimpl
def hp_families():
    return [ModuleFamily(name="acme_norm", baseline="acme_text_for_list.plugin:hp_families", kernels="rms_norm")]
