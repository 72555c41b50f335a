"""Common parts of all blocks of the configuration: number types, "auto", doubled spellings, errors, warnings."""

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
# JSON's numbers, and those that YAML reads as strings: 1e-6 and 5e8 have no dot.
_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")


def is_auto(value: object) -> bool:
    """Tell whether a value is left to a trainer to fill in."""
    return isinstance(value, str) and value == AUTO


def read_number(value: object) -> object:
    """Turns a string that is written as a number, such as "1e-6", into that number; returns anything else as it is."""
    if not isinstance(value, str) or _NUMBER.fullmatch(value) is None:
        return value
    try:
        return int(value)
    except ValueError:
        return float(value)


def number(value: object) -> object:
    """Refuses booleans, which Python counts as integers: `"queue_depth": true` is a slip, not 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "a boolean is not a number")
    return read_number(value)


def integer(value: object) -> object:
    """Turns 5e8 into 500000000; pydantic alone would refuse the floats above 2**63."""
    value = number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def bound(value: object) -> object:
    """Rounds a fraction down: "at most 15.4 elements" and "at most 15" allow the same."""
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
    """All keys that set a field; the first is the one the documentation uses."""
    if isinstance(field.validation_alias, AliasChoices):
        return tuple(str(choice) for choice in field.validation_alias.choices)
    return (name,)


def alias(*keys: str) -> AliasChoices:
    """The accepted keys of a field, the documented one first."""
    return AliasChoices(*keys)


class Block(BaseModel):
    """One JSON object of the configuration: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(
        # A key with a typing error would otherwise be a setting that has no effect.
        extra="forbid",
        # One default block may serve all configurations, and what ranks have compared stays as it was.
        frozen=True,
        # They become descriptions, of which docs/configuration.md is made.
        use_attribute_docstrings=True,
        # Python's json reads Infinity, which passes any lower bound.
        allow_inf_nan=False,
        # Before 2.10, pydantic warns of every field that starts with model_.
        protected_namespaces=(),
        # Validators take 0.1 s to build, which an import need not wait for.
        defer_build=True,
    )

    retired: ClassVar[Mapping[str, str]] = {}
    """Deprecated keys and what took their place, for suggestions and the reference page."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: object) -> object:
        # Pydantic says better what is wrong with the type.
        if not isinstance(data, Mapping):
            return data
        # A copy: keys are taken out and rewritten here, and the caller's mapping must stay as it is.
        given = dict(data)
        for name, field in cls.model_fields.items():
            found = [key for key in spellings(name, field) if key in given]
            if len(found) > 1:
                raise ValueError(f"{' and '.join(found)} are two spellings of one key; keep one of them")
            for key in found:
                if is_auto(given[key]):
                    # Stands for the default. Gone before deprecated forms are looked at, so that an old key and a new
                    # one at "auto" do not clash.
                    del given[key]
        return cls.upgrade(given)

    @classmethod
    def upgrade(cls, given: dict[str, object]) -> dict[str, object]:
        """Rewrites deprecated forms to the current ones; blocks that have such forms override it."""
        return given


# Errors.


def listing(headline: str, lines: Sequence[str], what: str) -> str:
    """A headline with one line behind it, or with the number of `what` and all lines below it."""
    if len(lines) == 1:
        return f"{headline}: {lines[0]}"
    return "\n  ".join([f"{headline}, {len(lines)} {what}:", *lines])


class ConfigError(ValueError):
    """A configuration is malformed, out of bounds or contradicts itself.

    `problems` holds one line per problem, each starting with the path of the key it is about.
    """

    headline = "the configuration cannot be used"

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self._text())

    def _text(self) -> str:
        return listing(self.headline, self.problems, "problems")


class UnsupportedConfigError(ConfigError):
    """A valid configuration asks for features that this version does not have."""

    headline = "the configuration asks for what is not in this version"


# Warnings.

# Packages that may lie between a user's line and a warning; deepspeed is the stand-in.
_BETWEEN = ("zeropp", "deepspeed", "pydantic", "torch", "contextlib", "functools")
# The rank's number by torchrun, Open MPI, MPICH and SLURM.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of user code that led here, not at one of this package, of torch or of the libraries between.

    ``stacklevel`` counts frames, and how many there are depends on who calls: a step may come by way of a scheduler's
    wrapper, and a block may end in contextlib's.
    """
    # One more, for this function.
    warnings.warn(message, category, stacklevel=_user_frame()[1] + 1)


def line_of_user() -> str:
    """The line of user code that led here, as ``file:number``, to be named in a message."""
    frame, _ = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _user_frame() -> tuple[FrameType, int]:
    """The innermost frame of user code, and its ``stacklevel`` as the caller's caller counts.

    This is the one place that looks at frames; only messages depend on what it finds.
    """
    frame = sys._getframe(2)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
        level += 1
    return frame, level


def notify_once(message: str, category: type[Warning] = UserWarning, *, first: bool | None = None) -> None:
    """Warn as :func:`warn_user` does, on the first rank alone: all ranks read the same configuration.

    ``first`` says whether this is the first rank of a group; None asks for the first of the job.

    A filter that turns the warning into an error raises on every rank, so that none waits for others that have raised.
    """
    if _is_first_rank() if first is None else first:
        warn_user(message, category)
        return
    # The filters stay in force, and what they let through is recorded instead of shown.
    with warnings.catch_warnings(record=True):
        warn_user(message, category)


def _is_first_rank() -> bool:
    # Without importing torch: where nobody has, there is no process group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    given = [os.environ[name] for name in _RANK_VARIABLES if name in os.environ]
    return not given or given[0] == "0"
