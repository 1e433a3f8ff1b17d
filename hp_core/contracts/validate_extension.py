"""Checks of kernels, precision schemes, recipe sections and commands."""

from __future__ import annotations

import re
from typing import get_args

from hp_core.contracts import checks
from hp_core.contracts.adapter import Role
from hp_core.contracts.checks import refuse
from hp_core.contracts.extension import CORE_COMMANDS, CORE_SECTIONS, Command, RecipeSection
from hp_core.contracts.kernel import OPS, Kernel
from hp_core.contracts.scheme import PrecisionScheme

_COMMAND = re.compile(r"[a-z][a-z0-9-]*")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def validate_kernel(kernel: Kernel) -> None:
    """Raise HP402 or HP403 unless the kernel implements a known operator."""
    subject = f"kernel {kernel.op}@{kernel.name}"
    checks.check_choice(subject, "op", kernel.op, OPS)
    checks.check_name(subject, "name", kernel.name)
    checks.check_name(subject, "device", kernel.device)
    checks.check_reference(subject, "implementation", kernel.implementation)
    checks.check_references(subject, {"condition": kernel.condition})
    checks.check_bool(subject, "automatic", kernel.automatic)
    checks.check_int(subject, "preference", kernel.preference, least=-(2**31))
    for module in kernel.requires:
        if not isinstance(module, str) or not _MODULE.fullmatch(module):
            raise refuse(f"{subject}: requires holds {module!r}", expected="names of modules")


def validate_scheme(scheme: PrecisionScheme) -> None:
    """Raise HP402 or HP403 unless the scheme names known dtypes."""
    subject = f"scheme {scheme.name!r}"
    checks.check_name(subject, "name", scheme.name)
    checks.check_choice(subject, "compute", scheme.compute, checks.DTYPES)
    for role, dtype in scheme.roles.items():
        checks.check_choice(subject, "a role", role, get_args(Role))
        checks.check_choice(subject, f"the dtype of role {role!r}", dtype, checks.DTYPES)
    for module, dtype in scheme.modules.items():
        checks.check_text(subject, "a module", module)
        checks.check_choice(subject, f"the dtype of {module!r}", dtype, checks.DTYPES)
    checks.check_texts(subject, "members", scheme.members)
    checks.check_references(subject, {"implementation": scheme.implementation})


def validate_section(section: RecipeSection) -> None:
    """Raise HP402 or HP403 unless the section has a legal name that is not the recipe's own."""
    subject = f"section {section.name!r}"
    checks.check_name(subject, "name", section.name)
    if section.name in CORE_SECTIONS:
        raise refuse(f"{subject} is hp-core's own", expected="another name")
    checks.check_reference(subject, "schema", section.schema)


def validate_command(command: Command) -> None:
    """Raise HP402 or HP403 unless the command has a legal name that is not hp-core's own, and one line of help."""
    subject = f"command {command.name!r}"
    if not isinstance(command.name, str) or not _COMMAND.fullmatch(command.name):
        raise refuse(f"{subject}: name is {command.name!r}", expected="lower-case letters, digits and hyphens")
    if command.name in CORE_COMMANDS:
        raise refuse(f"{subject} is hp-core's own", expected="another name")
    checks.check_text(subject, "help", command.help)
    if "\n" in command.help.strip():
        raise refuse(f"{subject}: help is {command.help!r}", expected="one line")
    checks.check_reference(subject, "main", command.main)
