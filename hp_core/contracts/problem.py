"""Problem: one finding of an additive check; the core turns it into an error."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Problem:
    """What is wrong (``what``), what was expected, where (an FQN or a recipe path) and the fix.

    ``where`` as a path of the recipe, such as ``mesh.tp`` or ``model.config.head_dim``, is told with its line. ``code`` is the
    error code when it is not the check's own, e.g. ``"HP502"`` for a divisibility that a configuration check finds.
    """

    what: str
    expected: str = ""
    where: str = ""
    fix: str = ""
    code: str | None = None


def indivisible(name: str, size: int, *, axis: str, degree: int) -> Problem:
    """Return the problem of a size that the degree of a mesh axis must divide, with the nearest degrees that do.

    Example::

        indivisible("num_attention_heads", 4, axis="tp", degree=3).fix  # 'set mesh.tp to 2 or 4'
    """
    below = (number for number in range(degree - 1, 0, -1) if size % number == 0)
    above = (number for number in range(degree + 1, min(size, 8 * degree) + 1) if size % number == 0)
    nearest = [number for number in (next(below, None), next(above, None)) if number is not None]
    return Problem(
        what=f"{name} ({size}) must be divisible by {axis} ({degree})",
        where=f"mesh.{axis}",
        fix=f"set mesh.{axis} to {' or '.join(map(str, nearest))}" if nearest else "",
        code="HP502",
    )
