"""Every error a user can meet: one tree, one code each.

    HPError
    |- FoundError          1xx  a name, a plugin or a section is not there
    |- MetadataError       2xx  a distribution does not fit this installation
    |- ImportStageError    3xx  a plugin's declarations cannot be imported or hooked up
    |- DeclarationError    4xx  a declaration contradicts its contract or another plugin
    |- PlanError           5xx  recipe, mesh, model and plan
    |- ConformanceError    6xx  a plugin fails the conformance kit
    |- RunError            7xx  processes, data and files of a run
    |- CheckpointError     8xx  weights in and out
    `- CodegenError        9xx  generated sources

An error says, in this order: the value found, what was expected, where it came from, and the fix.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

# code -> what it means, in one line. The reference page of error codes is generated from this table.
CODES: dict[str, str] = {
    "HP101": "A name is not provided by any installed plugin.",
    "HP102": "A switch names a plugin that is not installed.",
    "HP103": "A distribution is installed twice; the first path hides the second.",
    "HP104": "A recipe section belongs to a plugin that is not installed.",
    "HP105": "Two distributions provide a plugin of the same name.",
    "HP106": "A plugin's entry point is malformed.",
    "HP201": "A plugin needs another version of a distribution.",
    "HP202": "A plugin needs a distribution that is not installed.",
    "HP301": "A plugin's declarations fail to import.",
    "HP302": "A plugin imports torch or a torch-based package while it is being listed.",
    "HP303": "A plugin's hook raises or returns something else than its declared type.",
    "HP311": "A plugin implements a hook that does not exist.",
    "HP312": "A plugin speaks another plugin API version.",
    "HP313": "A plugin's hook asks for an argument that does not exist.",
    "HP314": "A plugin defines a hook function without marking it as a hook.",
    "HP401": "Two plugins provide the same declaration.",
    "HP402": "A declaration contradicts its contract.",
    "HP403": "A lazy reference is malformed or points to nothing.",
    "HP501": "The mesh does not fit the number of processes.",
    "HP502": "A size is not divisible by a mesh degree.",
    "HP503": "A mesh degree or axis is not legal.",
    "HP510": "A file named by the recipe or the command line does not exist or cannot be read.",
    "HP511": "The recipe is not valid YAML.",
    "HP512": "The recipe has an unknown key.",
    "HP513": "A recipe value has the wrong type.",
    "HP514": "A recipe value is not legal.",
    "HP515": "A recipe asks for something this version does not implement.",
    "HP516": "The recipe lacks a required key.",
    "HP517": "A key occurs twice in the recipe.",
    "HP518": "A --set argument is malformed.",
    "HP520": "A layout rule does not match the modules it was declared for.",
    "HP521": "A parameter is owned by nobody or by two owners.",
    "HP522": "A layout contradicts the module it describes.",
    "HP523": "A producer's layout differs from its consumer's.",
    "HP524": "The model or its configuration is outside what the adapter supports.",
    "HP525": "A plan names something that is not in the model, or the reverse.",
    "HP526": "An initialisation does not cover a parameter or a buffer.",
    "HP527": "A pattern matches nothing.",
    "HP528": "A plugin's plan check refuses the plan.",
    "HP530": "An override does not fit the module it changes.",
    "HP531": "A precision scheme is not supported by a module in its scope.",
    "HP532": "A precision scheme is enabled and changes nothing.",
    "HP533": "A precision scheme's implementation breaks its contract.",
    "HP540": "A replacement does not match the model.",
    "HP541": "A replacement's candidate breaks its contract.",
    "HP542": "The model's configuration cannot be built.",
    "HP550": "A tensor does not fit the boundary it enters or leaves.",
    "HP551": "A module and its binding disagree.",
    "HP552": "A local view is asked for outside the time it is valid.",
    "HP553": "A buffer was never filled.",
    "HP554": "An attention is asked for a mask or a score that it does not compute.",
    "HP560": "A family request is not legal.",
    "HP561": "A component that was built by itself disagrees with the plan that finds it.",
    "HP570": "A kernel cannot be used where it is asked for.",
    "HP571": "A planned kernel is not available on this machine.",
    "HP580": "A protocol cannot be used where it is asked for.",
    "HP581": "A module's declaration of how it communicates does not fit it.",
    "HP701": "A rank loaded other plugins than rank 0.",
    "HP702": "A process of the job failed.",
    "HP703": "A port is in use.",
    "HP704": "A file cannot be written.",
    "HP705": "The run directory cannot be used.",
    "HP706": "A loss or a gradient is not finite.",
    "HP707": "The processes were started in a way the job cannot use.",
    "HP708": "The machine lacks the device that the recipe asks for.",
    "HP709": "A step cannot be compared with one process: rounding could turn what it does.",
    "HP710": "The data cannot be read.",
    "HP711": "The data is too short.",
    "HP712": "The tokenizer cannot be used with this model.",
    "HP801": "A checkpoint lacks a key.",
    "HP802": "A checkpoint has an unexpected key.",
    "HP803": "A checkpoint tensor has the wrong shape or dtype, or values that are not finite.",
    "HP804": "A checkpoint file is missing or damaged.",
    "HP805": "A checkpoint cannot be written.",
    "HP806": "A parameter has no or several checkpoint keys.",
    "HP807": "A checkpoint holds different values for tied parameters.",
}


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or an empty string."""
    import difflib  # slow to import, and only a mistake needs it

    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def one_line(text: str) -> str:
    """Return ``text`` with every run of line breaks and control characters replaced by one space.

    Texts of a user's files and of libraries end up in tables and error lines; a terminal must show them as one line.
    """
    return "".join(" " if breaks else "".join(part) for breaks, part in groupby(text, key=_breaks)).rstrip()


def _breaks(character: str) -> bool:
    """Whether ``character`` is a control character (C0, DEL, C1) or one of Unicode's two separators of lines."""
    return character < " " or "\x7f" <= character <= "\x9f" or character in "\u2028\u2029"


class HPError(Exception):
    """A user's mistake or an environment's fault, told in one line with a stable code.

    ``what`` names the value found; ``expected``, ``where`` and ``fix`` are appended as
    ``what; expected .... where. fix: ...``. ``where`` is a recipe path and line, a plugin, a module FQN or a mesh.
    """

    family = ""

    def __init__(self, code: str, what: str, *, expected: str = "", where: str = "", fix: str = "") -> None:
        assert code in CODES, code
        assert code[2:].startswith(self.family), code
        self.code = code
        self.what = what
        self.expected = expected
        self.where = where
        self.fix = fix
        super().__init__(code, self.message)

    @property
    def message(self) -> str:
        """The text without the code."""
        text = self.what + (f"; expected {self.expected}" if self.expected else "")
        for part in (self.where, f"fix: {self.fix}" if self.fix else ""):
            if part:
                text += (" " if text.endswith((".", "?", "!")) else ". ") + part
        return text

    @property
    def line(self) -> str:
        """The one line that a command prints: ``hp: error[CODE]: message``, whatever the texts hold."""
        return one_line(f"hp: error[{self.code}]: {self.message}")

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.code, self.what, self.expected, self.where, self.fix)


def _rebuild(cls: type[HPError], code: str, what: str, expected: str, where: str, fix: str) -> HPError:
    return cls(code, what, expected=expected, where=where, fix=fix)


class FoundError(HPError):
    """A name, a plugin or a section is not there."""

    family = "1"


class MetadataError(HPError):
    """A distribution does not fit this installation."""

    family = "2"


class ImportStageError(HPError):
    """A plugin's declarations cannot be imported or hooked up."""

    family = "3"


class DeclarationError(HPError):
    """A declaration contradicts its contract or another plugin."""

    family = "4"


class PlanError(HPError):
    """The recipe, the mesh, the model and the plan do not fit together."""

    family = "5"


class ConformanceError(HPError):
    """A plugin fails the conformance kit."""

    family = "6"


class RunError(HPError):
    """Processes, data and files of a run."""

    family = "7"


class CheckpointError(HPError):
    """Weights cannot be read or written."""

    family = "8"


class CodegenError(HPError):
    """Generated sources are missing, stale or not renderable."""

    family = "9"


def reference_page() -> str:
    """Return the reference page of all codes, one heading (and so one anchor) per code.

    Example::

        python -c "from hp_core.errors import reference_page; print(reference_page(), end='')" > docs/reference/errors.md
    """
    parts = ["# Error codes", "", f"An error is one line: `{_EXAMPLE.line}`.", "`hp --debug` adds the traceback.", ""]
    for cls in sorted(HPError.__subclasses__(), key=lambda cls: cls.family):
        codes = {code: meaning for code, meaning in CODES.items() if code[2] == cls.family}
        if codes:
            parts += [f"## {cls.family}xx: {(cls.__doc__ or '').rstrip('.')}", ""]
            parts += [line for code, meaning in codes.items() for line in (f"### {code}", "", meaning, "")]
    return "\n".join(parts).rstrip() + "\n"


_EXAMPLE = PlanError(
    "HP502",
    "num_experts (128) must be divisible by ep (48)",
    where="recipe.yaml:4, mesh: dp_replicate=1 dp_shard=48 pp=1 cp=1 tp=1 ep=48",
    fix="set mesh.ep to 32 or 64",
)
