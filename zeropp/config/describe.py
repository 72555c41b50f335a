"""Values, types and bounds of the configuration in words, for error messages and the reference page."""

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
    """A value as JSON shows it, large integers with separators, `sys.maxsize` and infinity by name."""
    if isinstance(value, BaseModel):
        return value_text(value.model_dump(mode="json"))
    # Before integers, which booleans are to Python.
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, int):
        # The default that stands for no bound; as digits it would say nothing.
        return "sys.maxsize" if value == sys.maxsize else f"{value:,}"
    if isinstance(value, float):
        return "infinity" if value == math.inf else repr(value)
    if isinstance(value, str | dict | list | tuple):
        # Messages need it: whatever was given must have some text.
        return json.dumps(value, default=repr, ensure_ascii=False)
    return repr(value)


def type_text(annotation: object, block_name: BlockNamer) -> str:
    """A type in words; `block_name` says how to refer to a nested block."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_text(get_args(annotation)[0], block_name)
    # Optional[int] and int | None differ in their origin.
    if origin in (Union, UnionType):
        return " or ".join(type_text(arg, block_name) for arg in get_args(annotation))
    if origin is Literal:
        return " or ".join(value_text(choice) for choice in get_args(annotation))
    if origin is dict:
        return "object"
    if origin is tuple:
        # All tuples here are of one type and any length.
        return f"list of {type_text(get_args(annotation)[0], block_name)}s"
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return block_name(annotation)
    # A type that has no words yet fails here, before a page without them is written.
    return _PLAIN[annotation]


def _metadata(annotation: object) -> Iterator[object]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    if get_origin(annotation) in (Annotated, Union, UnionType):
        for arg in get_args(annotation):
            yield from _metadata(arg)


def bounds_text(field: FieldInfo) -> str:
    """The bounds of a number, such as `>= 0, <= 1`; empty where there are none."""
    found = []
    # Pydantic moves the bounds of a plain type to the field; in a union they stay with its member.
    for item in [*field.metadata, *_metadata(field.annotation)]:
        # Among them are validators and other metadata, which have no sign.
        if type(item) in _SIGNS:
            sign, attribute = _SIGNS[type(item)]
            found.append(f"{sign} {value_text(getattr(item, attribute))}")
    return ", ".join(found)


def shortened(value: object) -> str:
    """A value as `value_text` gives it, cut to fit an error message."""
    return cut(value_text(value))


def cut(text: str) -> str:
    """The first 80 characters of a text, for an error message."""
    return text if len(text) <= 80 else text[:77] + "..."


def expected_text(field: FieldInfo) -> str:
    """The values that a field takes, for an error message: type, bounds, default."""
    bounds = bounds_text(field)
    # A whole block is no help in an error message.
    default = "" if isinstance(field.default, BaseModel) else f" (default {shortened(field.default)})"
    return type_text(field.annotation, lambda _: "an object") + (f" {bounds}" if bounds else "") + default


def nested_block(field: FieldInfo) -> type[Block] | None:
    """The block that a field holds, if it holds one."""
    # A block that may be null is among the members of a union.
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Block):
            return candidate
    return None


def blocks(model: type[Block], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Block]]]:
    """A block and all blocks below it, each with the documented path that leads to it."""
    yield path, model
    for name, field in model.model_fields.items():
        inner = nested_block(field)
        if inner is not None:
            yield from blocks(inner, (*path, spellings(name, field)[0]))
