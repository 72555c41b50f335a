"""What every block of the configuration shares: number types, "auto", doubled spellings, warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

AUTO = "auto"
# Packages that may lie between a user's line and a warning.
_BETWEEN = ("zeropp", "pydantic", "torch", "contextlib", "functools")


def is_auto(value: object) -> bool:
    """Whether a value is left to a trainer to fill in."""
    return isinstance(value, str) and value == AUTO


def number(value: object) -> object:
    """Refuses booleans, which Python counts as integers: `"queue_depth": true` is a slip, not 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("not_a_number", "a boolean is not a number")
    return value


def integer(value: object) -> object:
    """Turns 5e8 into 500000000; pydantic alone would refuse the floats above 2**63."""
    value = number(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Integer = Annotated[int, BeforeValidator(integer)]
Count = Annotated[Integer, Ge(0)]
Positive = Annotated[Integer, Ge(1)]
Real = Annotated[float, BeforeValidator(number)]
NonNegative = Annotated[Real, Ge(0)]
PositiveReal = Annotated[Real, Gt(0)]


def spellings(name: str, field: FieldInfo) -> tuple[str, ...]:
    """All keys that set a field; the first is the one the documentation uses."""
    if isinstance(field.validation_alias, AliasChoices):
        return tuple(str(choice) for choice in field.validation_alias.choices)
    return (name,)


def alias(*keys: str) -> AliasChoices:
    """The accepted keys of a field, the documented one first."""
    return AliasChoices(*keys)


def notify(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of user code that led here, not at one of this package, of torch or of the libraries between.

    ``stacklevel`` counts frames, and how many there are depends on who calls: a step may come by way of a scheduler's
    wrapper, and a block may end in contextlib's.
    """
    # Level 1 is this function, 2 its caller, which is where the walk begins.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


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
