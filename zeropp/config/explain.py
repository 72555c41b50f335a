"""Turns pydantic's errors into lines that say what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zeropp.config.base import Block, spellings
from zeropp.config.describe import blocks, expected_text, nested_block, shortened
from zeropp.config.inert import OutsideKeys

Location = Sequence[int | str]


def problems(error: ValidationError, model: type[Block]) -> list[str]:
    """One line for each problem, led by the path of its key as the user spelled it."""
    return [_problem(details, model) for details in error.errors()]


def _problem(details: ErrorDetails, model: type[Block]) -> str:
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{path}: unknown key; {_suggestion(details['loc'], model)}"
    if details["type"] == "value_error":
        # The validator's own words; pydantic's text puts its own in front.
        message = str(details["ctx"]["error"])
        return f"{path}: {message}" if path else message
    field = _field(details["loc"], model)
    # A rule about a whole block, or about the top level.
    if field is None:
        return f"{path}: {details['msg']}, got {shortened(details['input'])}"
    return f"{path}: got {shortened(details['input'])}; expected {expected_text(field)}"


def _by_key(model: type[Block], key: object) -> FieldInfo | None:
    for name, field in model.model_fields.items():
        if key in spellings(name, field):
            return field
    return None


def _block(path: Location, model: type[Block]) -> type[Block]:
    for key in path:
        field = _by_key(model, key)
        inner = nested_block(field) if field is not None else None
        if inner is None:
            break
        model = inner
    return model


def _field(path: Location, model: type[Block]) -> FieldInfo | None:
    """The field that an error is about; errors inside a list or an object belong to its field."""
    found = None
    for key in path:
        field = _by_key(model, key)
        if field is None:
            break
        found = field
        # Behind a field that is no block come indices of a list or keys of the user's own.
        model = nested_block(field) or model
    return found


def _suggestion(path: Location, model: type[Block]) -> str:
    """The same key in another block, the nearest key of this block, or all keys of this block."""
    key = str(path[-1])
    # First of all: no likeness of names finds a right key that stands in the wrong block.
    homes = [".".join((*where, key)) for where, block in blocks(model) if _by_key(block, key) is not None]
    # Among several homes none can be recommended.
    if len(homes) == 1:
        return f"it belongs elsewhere, as {homes[0]}"
    here = _block(path[:-1], model)
    keys = [spellings(name, field) for name, field in here.model_fields.items()]
    # Deprecated keys, too: they work, and their warning names the new one.
    near = difflib.get_close_matches(key, [*itertools.chain.from_iterable(keys), *here.retired], n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    # Keys of other features are accepted, but not worth recommending.
    known = [first for first, *_ in keys if first not in OutsideKeys.model_fields]
    return f"remove it, or use one of: {', '.join(known)}"
