"""Turns pydantic's errors into lines that say what was given, what was expected and what to do."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zeropp.config.base import Block, spellings
from zeropp.config.describe import blocks, expected_text, nested_block, shortened, value_text
from zeropp.config.foreign import ARGUMENTS, meaning, place
from zeropp.config.runtime import NamedBlock
from zeropp.config.support import SUPPORT, Kind, is_accepted

Location = Sequence[int | str]


def problems(error: ValidationError, model: type[Block], given: Mapping[str, object]) -> list[str]:
    """One line for each problem, led by the path of its key as the user spelled it.

    Args:
        error: of pydantic.
        model: of the whole configuration.
        given: what was to be validated.
    """
    return [_problem(details, model, given) for details in error.errors()]


def _problem(details: ErrorDetails, model: type[Block], given: Mapping[str, object]) -> str:
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{path}: unknown key; {_suggestion(details['loc'], model, given)}"
    if details["type"] == "value_error":
        # The validator's own words; pydantic's text puts its own in front.
        message = str(details["ctx"]["error"])
        return f"{path}: {message}" if path else message
    field = _field(details["loc"], model)
    # A rule about a whole block, or about the top level.
    if field is None:
        return f"{path}: {details['msg']}, got {shortened(details['input'])}"
    return f"{path}: got {shortened(details['input'])}; expected {expected_text(field)}{_written_out(field, details)}"


def _written_out(field: FieldInfo, details: ErrorDetails) -> str:
    """A block that says what a single value in its place may have been meant to say; empty where none can."""
    block, value = nested_block(field), details["input"]
    if block is None or details["type"] not in ("model_type", "model_attributes_type"):
        return ""
    for name, kind in {"enabled": bool, "stage": int, "type": str, "device": str}.items():
        if name in block.model_fields and isinstance(value, kind):
            return f"; write {value_text({name: value})}"
    return ""


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


def _suggestion(path: Location, model: type[Block], given: Mapping[str, object]) -> str:
    """A remedy for an unknown key: by its meaning, by its name in another block, by its spelling, or all keys here.

    A key that is refused itself is never part of it.
    """
    words = [str(part) for part in path]
    here = _block(path[:-1], model)
    if issubclass(here, NamedBlock):
        return _beside_params(words, here, given.get(words[0]), model)
    # First of all: no likeness of names finds a right key that stands in the wrong block.
    return meaning(words) or _elsewhere(words[-1], model) or _alike(words, here, model) or _all_keys(here)


class _Home(NamedTuple):
    """One spelling of a key in one block."""

    key: str
    path: str
    block: type[Block]
    name: str

    @property
    def accepted(self) -> bool:
        return is_accepted(self.block, self.name)


@functools.cache
def _homes(model: type[Block]) -> list[_Home]:
    return [
        _Home(key, ".".join((*where, key)), block, name)
        for where, block in blocks(model)
        for name, field in block.model_fields.items()
        for key in spellings(name, field)
    ]


def _elsewhere(key: str, model: type[Block]) -> str:
    """A remedy from the blocks that have a key of this very name."""
    found = [home for home in _homes(model) if home.key == key]
    homes = [home.path for home in found if home.accepted]
    if homes == [key]:
        return "it belongs to the top level"
    if homes:
        # Of many, as of "enabled", none can be recommended.
        return f"it belongs elsewhere, as {' or '.join(homes)}" if len(homes) < 3 else ""
    why = [SUPPORT[home.block][home.name].instead for home in found]
    return f"remove it, since it is not in this version{f' ({why[0]})' if why[0] else ''}" if why else ""


def _alike(path: Sequence[str], here: type[Block], model: type[Block]) -> str:
    """A remedy from the key that is spelled most like this one: of the same block, or much more like of another one."""
    # Deprecated keys, too: they work, and their warning names the new one.
    same = [home.key for home in _homes(model) if home.block is here and home.accepted]
    other = {home.key: home.path for home in _homes(model) if home.block is not here and home.accepted}
    key = path[-1].lower()
    near = difflib.get_close_matches(key, other, n=1, cutoff=0.9)
    # Two of the same name are found in favour of this block.
    [best] = difflib.get_close_matches(key, [*same, *here.retired, *near], n=1, cutoff=0.75) or [""]
    if not best or best in (*same, *here.retired):
        return f"did you mean {best!r}?" if best else ""
    return f"did you mean {other[best]!r}{'' if '.' in other[best] else ' at the top level'}?"


def _all_keys(here: type[Block]) -> str:
    # Keys without effect are accepted, but not worth recommending.
    wanted = [
        spellings(name, field)[0]
        for name, field in here.model_fields.items()
        if SUPPORT[here][name].kind not in (Kind.UNREAD, Kind.NEEDLESS) and is_accepted(here, name)
    ]
    return f"remove it, or use one of: {', '.join(wanted)}" if wanted else "remove it"


def _beside_params(path: Sequence[str], here: type[Block], block: object, model: type[Block]) -> str:
    """A remedy for a key of the ``optimizer`` or ``scheduler`` block that is none of its own."""
    key, inside = path[-1], f"{path[0]}.params"
    kind = str(block.get("type")) if isinstance(block, Mapping) else ""
    listed = ARGUMENTS.get(kind) or ARGUMENTS.get(kind.lower())
    # Of another class any argument may be one.
    taken = listed or frozenset[str]().union(*ARGUMENTS.values())
    if key in taken:
        return f"it belongs into {inside}"
    # Another name of an argument, such as learning_rate, may mean nothing that this class takes.
    argument = place(path).removeprefix(f"{inside}.")
    if (told := meaning(path)) and (f"{inside}." not in told or argument in taken):
        return told
    if elsewhere := _elsewhere(key, model):
        return elsewhere
    paths = {**{argument: f"{inside}.{argument}" for argument in taken}, **{name: name for name in here.model_fields}}
    [near] = difflib.get_close_matches(key.lower(), paths, n=1, cutoff=0.75) or [""]
    if near:
        return f"did you mean {paths[near]!r}?"
    return f"remove it: {kind} does not take it" if listed else f"remove it, or put it into {inside} if {kind} takes it"
