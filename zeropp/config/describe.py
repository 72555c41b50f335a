"""Text forms of configuration values, types and bounds, for error messages and docs/configuration.md."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from zeropp.config.base import Block, spellings

_PLAIN: dict[object, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    Path: "path",
    NoneType: "null",
    JsonValue: "any JSON",
}
_SIGNS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}

BlockNamer = Callable[[type[Block]], str]


def value_text(value: object) -> str:
    """Return a value as JSON text. Integers get thousands separators; `sys.maxsize` and infinity appear by name."""
    if isinstance(value, BaseModel):
        return value_text(value.model_dump(mode="json"))
    # Test for booleans before integers, because isinstance(True, int) is true.
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        # sys.maxsize is the default for "no bound", so its name says more than its digits.
        return "sys.maxsize" if value == sys.maxsize else f"{value:,}"
    if isinstance(value, float):
        return "infinity" if value == math.inf else repr(value)
    if isinstance(value, str | dict | list | tuple):
        # default=repr: a message must also show values that JSON cannot encode.
        return json.dumps(value, default=repr, ensure_ascii=False)
    return repr(value)


def type_text(annotation: object, block_name: BlockNamer) -> str:
    """Return a type annotation in words.

    Args:
        annotation: the annotation of a configuration field.
        block_name: function that returns the text for a nested block.

    Raises:
        KeyError: the type has no words in `_PLAIN` yet.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_text(get_args(annotation)[0], block_name)
    # The origin of Optional[int] is Union, and the origin of int | None is UnionType.
    if origin in (Union, UnionType):
        return " or ".join(type_text(arg, block_name) for arg in get_args(annotation))
    if origin is Literal:
        return " or ".join(value_text(choice) for choice in get_args(annotation))
    if origin is dict:
        return "object"
    if origin is tuple:
        # All tuples of the configuration have the form tuple[T, ...].
        return f"list of {type_text(get_args(annotation)[0], block_name)}s"
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return block_name(annotation)
    # For a type without an entry this raises, so that docs/configuration.md is never generated without its text.
    return _PLAIN[annotation]


def _metadata(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for arg in get_args(annotation):
            yield from _metadata(arg)


def bounds_text(field: FieldInfo) -> str:
    """Return the bounds of a numeric field, such as `>= 0, <= 1`; "" if the field has no bounds."""
    found = []
    # Pydantic moves the bounds of a plain type to the field, but leaves those of a union's member in the annotation.
    for item in [*field.metadata, *_metadata(field.annotation)]:
        # The metadata also holds validators, which are not bounds.
        if type(item) in _SIGNS:
            sign, attribute = _SIGNS[type(item)]
            found.append(f"{sign} {value_text(getattr(item, attribute))}")
    return ", ".join(found)


def shortened(value: object) -> str:
    """Return the text of a value, cut to 80 characters for an error message."""
    return cut(value_text(value))


def cut(text: str) -> str:
    """Return a text, cut to 80 characters with "..." at the end if it is longer."""
    return text if len(text) <= 80 else text[:77] + "..."


def expected_text(field: FieldInfo) -> str:
    """Return the type, bounds and default of a field, for an error message."""
    bounds = bounds_text(field)
    # Leave out the default of a nested block: cut to 80 characters, it would say little.
    default = "" if isinstance(field.default, BaseModel) else f" (default {shortened(field.default)})"
    return type_text(field.annotation, lambda _: "an object") + (f" {bounds}" if bounds else "") + default


def nested_block(field: FieldInfo) -> type[Block] | None:
    """Return the class of the block that a field holds; None if the field holds no block."""
    # The annotation of an optional block is a union, so look at its members, too.
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Block):
            return candidate
    return None


def blocks(model: type[Block], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Block]]]:
    """Iterate over a block and all blocks nested in it.

    Yields:
        The path of documented keys that leads to the block, and the block's class.
    """
    yield path, model
    for name, field in model.model_fields.items():
        inner = nested_block(field)
        if inner is not None:
            yield from blocks(inner, (*path, spellings(name, field)[0]))
