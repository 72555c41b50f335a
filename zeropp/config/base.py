"""Common parts of all configuration blocks: number types, "auto" values, alternative keys, errors and warnings."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

# Numbers.

AUTO = "auto"
# YAML reads numbers without a dot, such as 1e-6 and 5e8, as strings. This pattern matches them and all JSON numbers.
_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")


def is_auto(value: object) -> bool:
    """Return True if a value is "auto", the placeholder that a trainer fills in."""
    return isinstance(value, str) and value == AUTO


def read_number(value: object) -> object:
    """Convert a string that is written as a number, such as "1e-6", to that number; return other values unchanged."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value) is None:
        return value
    try:
        return int(value)
    except ValueError:
        return float(value)


def number(value: object) -> object:
    """Raise an error for booleans; convert numeric strings to numbers.

    In Python a boolean is an integer. Without this check, `"queue_depth": true` would mean 1 instead of a mistake.
    """
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "a boolean is not a number")
    return read_number(value)


def integer(value: object) -> object:
    """Convert a float with a whole value, such as 5e8, to an integer. Pydantic rejects such floats above 2**63."""
    value = number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def bound(value: object) -> object:
    """Round a fractional upper bound down to an integer: at most 15.4 elements means at most 15 elements."""
    value = number(value)
    return math.floor(value) if isinstance(value, float) and math.isfinite(value) else value


Integer = Annotated[int, BeforeValidator(integer)]
Count = Annotated[Integer, Ge(0)]
Positive = Annotated[Integer, Ge(1)]
Bound = Annotated[int, BeforeValidator(bound), Ge(0)]
Real = Annotated[float, BeforeValidator(number)]
NonNegative = Annotated[Real, Ge(0)]
PositiveReal = Annotated[Real, Gt(0)]


# Blocks.


def spellings(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return all JSON keys that set a field. The documentation uses the first one."""
    if isinstance(field.validation_alias, AliasChoices):
        return tuple(str(choice) for choice in field.validation_alias.choices)
    return (name,)


def alias(*keys: str) -> AliasChoices:
    """Declare the accepted JSON keys of a field, the documented key first."""
    return AliasChoices(*keys)


class Block(BaseModel):
    """Base class of configuration blocks: one JSON object. Unknown keys are errors, and instances are immutable."""

    model_config = ConfigDict(
        # Without this, a misspelt key would be ignored silently.
        extra="forbid",
        # All configurations share the default blocks, so a change in one would show in the others. Also, values must
        # not change after ranks have compared them.
        frozen=True,
        # Field docstrings become field descriptions. docs/configuration.py generates docs/configuration.md from them.
        use_attribute_docstrings=True,
        # Python's json module accepts Infinity, which would pass every lower bound.
        allow_inf_nan=False,
        # Pydantic before 2.10 warns about each field whose name starts with model_.
        protected_namespaces=(),
        # Building the validators takes 0.1 s. Defer that to the first use, so that importing zeropp stays fast.
        defer_build=True,
    )

    retired: ClassVar[Mapping[str, str]] = {}
    """Deprecated keys and their replacements, for error messages and docs/configuration.md."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: object) -> object:
        # Pydantic reports a value of the wrong type with a better message.
        if not isinstance(data, Mapping):
            return data
        # Copy first: this method and upgrade() remove and rewrite keys, and the caller's mapping must not change.
        given = dict(data)
        for name, field in cls.model_fields.items():
            found = [key for key in spellings(name, field) if key in given]
            if len(found) > 1:
                raise ValueError(f"{' and '.join(found)} are two spellings of one key; keep one of them")
            for key in found:
                if is_auto(given[key]):
                    # "auto" means the default, so remove the key. Do this before upgrade(), which would otherwise
                    # report a conflict between a deprecated key and its replacement at "auto".
                    del given[key]
        return cls.upgrade(given)

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Rewrite deprecated keys to current ones. Blocks that have deprecated keys override this method."""
        return given


# Errors.


def listing(headline: str, lines: Sequence[str], what: str) -> str:
    """Format a message: the headline and a single line, or the headline, the number of lines and all lines below it.

    Args:
        headline: first words of the message.
        lines: the items of the list.
        what: noun for the items, in the plural.
    """
    if len(lines) == 1:
        return f"{headline}: {lines[0]}"
    return "\n  ".join([f"{headline}, {len(lines)} {what}:", *lines])


class ConfigError(ValueError):
    """Error for a configuration that is malformed, out of bounds or contradicts itself.

    Attributes:
        problems: one line per problem. Most lines start with the path of the key.
    """

    headline = "the configuration cannot be used"

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        return listing(self.headline, self.problems, "problems")


class UnsupportedConfigError(ConfigError):
    """Error for a valid configuration that asks for features which this version does not have."""

    headline = "the configuration asks for features that are not in this version"


# Warnings.

# Packages whose stack frames are skipped in the search for the user's line. "deepspeed" is zeropp's stand-in for it.
_BETWEEN = ("zeropp", "deepspeed", "pydantic", "torch", "contextlib", "functools")
# Environment variables that hold the rank under torchrun, Open MPI, MPICH and SLURM.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the line of user code that called zeropp.

    A constant ``stacklevel`` cannot do this, because the number of stack frames of zeropp, torch and other libraries
    between the user's line and this function varies: a learning rate scheduler may wrap the step, for example.
    """
    # _user_frame counts from the caller of this function. warnings.warn counts this function's frame, too.
    warnings.warn(message, category, stacklevel=_user_frame()[1] + 1)


def line_of_user() -> str:
    """Return the line of user code that called zeropp, as ``file:number``, for messages."""
    frame, _ = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _user_frame() -> tuple[FrameType, int]:
    """Return the innermost stack frame of user code, and its ``stacklevel`` as seen from the caller's caller.

    This is the only function of zeropp that inspects stack frames. Only messages depend on the result.
    """
    frame = sys._getframe(2)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
        level += 1
    return frame, level


def notify_once(message: str, category: type[Warning] = UserWarning, *, first: bool | None = None) -> None:
    """Issue a warning with :func:`warn_user` on the first rank only, because all ranks read the same configuration.

    If a warning filter turns the warning into an error, all ranks raise it. Otherwise the other ranks would wait for
    the first rank in their next collective.

    Args:
        message: text of the warning.
        category: class of the warning.
        first: True if this rank is the first of its group; None to decide by the rank in the job.
    """
    if _is_first_rank() if first is None else first:
        warn_user(message, category)
        return
    # Warning filters still apply here, so a filter "error" raises. A warning is recorded instead of shown.
    with warnings.catch_warnings(record=True):
        warn_user(message, category)


def _is_first_rank() -> bool:
    # Do not import torch here: the import is slow, and without it there is no process group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    given = [os.environ[name] for name in _RANK_VARIABLES if name in os.environ]
    return not given or given[0] == "0"
