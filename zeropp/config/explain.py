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
from zeropp.config.foreign import ARGUMENTS, by_words, meaning, meant_type, place
from zeropp.config.runtime import NamedBlock
from zeropp.config.support import SUPPORT, is_accepted, is_recommended

Location = Sequence[int | str]

# Names that say something only together with the block that they stand in.
_OF_ITS_BLOCK = frozenset(
    ["enabled", "type", "params", "dtype", "names", "classes", "local", "cross", "profile", "ratio"]
)
# Words that make names mean different things, however much they are spelled alike.
_OPPOSITES = (
    {"min", "max"}, {"read", "write"}, {"first", "last"}, {"local", "cross"}, {"local", "global"}, {"micro", "global"},
    {"fp16", "bf16"}, {"fp16", "fp32"}, {"bf16", "fp32"}, {"weight", "gradient"}, {"weights", "gradients"},
    {"param", "optimizer"}, {"params", "optimizer"}, {"parameters", "optimizer"}, {"reduce", "gather"},
)  # fmt: skip
_SWITCHES = {"enabled", "enable", "is_enabled", "use", "active", "activate", "activated", "on"}


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
    for name, kind in {"enabled": bool, "stage": int, "type": str, "device": str | bool}.items():
        if name not in block.model_fields or not isinstance(value, kind):
            continue
        if isinstance(value, str):
            value = meant_type(value) or value if name == "type" else value.lower()
        elif name == "device":
            value = "cpu" if value else "none"
        written = value_text({name: value})
        return f"; write {written}" if _is_valid(block, {name: value}) else ""
    # Blocks that have no switch say so of a key in them, too.
    reason = meaning([*map(str, details["loc"]), "enabled"]) if isinstance(value, bool) else ""
    return f"; {reason}" if reason.startswith("remove it: ") else ""


def _is_valid(block: type[Block], given: Mapping[str, object]) -> bool:
    try:
        block.model_validate(given)
    except ValidationError:
        return False
    return True


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

    A key that is refused or has no effect is never part of it, except to say so.
    """
    words = [str(part) for part in path]
    here = _block(path[:-1], model)
    if issubclass(here, NamedBlock):
        return _beside_params(words, here, given, model)
    return (
        # First of all: no likeness of names finds a right key that stands in the wrong block.
        _not_taken(words, given)
        or meaning(words)
        or _switch(words[-1], here, model)
        or _elsewhere(words, model)
        or by_words(words[-1])
        or _alike(words, here, model)
        or _all_keys(here)
    )


class _Home(NamedTuple):
    """One spelling of a key in one block."""

    key: str
    where: tuple[str, ...]
    block: type[Block]
    name: str

    @property
    def path(self) -> str:
        return ".".join((*self.where, self.key))

    @property
    def accepted(self) -> bool:
        return is_accepted(self.block, self.name)

    @property
    def recommended(self) -> bool:
        return is_recommended(self.block, self.name)

    def serves(self, path: Sequence[str]) -> bool:
        """Tell whether a key that stands at `path` may have been meant to be this one."""
        # "type" of any block is not that of the optimizer.
        return self.key not in _OF_ITS_BLOCK or self.where[:-1] == (*path[:-1],)


@functools.cache
def _homes(model: type[Block]) -> list[_Home]:
    return [
        _Home(key, where, block, name)
        for where, block in blocks(model)
        for name, field in block.model_fields.items()
        for key in spellings(name, field)
    ]


def _read(given: object, path: str) -> object:
    """The value that the user wrote at a path; None where there is none."""
    for part in path.split("."):
        given = given.get(part) if isinstance(given, Mapping) else None
    return given


def _switch(key: str, here: type[Block], model: type[Block]) -> str:
    """A remedy for a switch in a block that has none, which is no likeness of another block's switch."""
    if key.lower() not in _SWITCHES:
        return ""
    if "enabled" in here.model_fields:
        return "did you mean 'enabled'?"
    if here is model:
        return "remove it: it does not say what is to be enabled"
    return (
        "remove it: this block has no such key and takes effect by being there; leave the whole block out for its "
        "defaults"
    )


def _idle(homes: Sequence[_Home]) -> str:
    """A remedy for a key that means one of these, none of which does anything."""
    if refused := [home for home in homes if not home.accepted]:
        why = SUPPORT[refused[0].block][refused[0].name].instead
        return f"remove it, since it is not in this version{f' ({why})' if why else ''}"
    return f"remove it, since {homes[0].path} has no effect in this version" if homes else ""


def _elsewhere(path: Sequence[str], model: type[Block]) -> str:
    """A remedy from the blocks that have a key of this very name."""
    key = path[-1]
    for where, block in blocks(model):
        if key in block.retired:
            return f"it is an old key of {'.'.join(where)}; set {block.retired[key]} there instead"
    found = [home for home in _homes(model) if home.key == key and home.serves(path)]
    homes = [home for home in found if home.recommended]
    if [home.path for home in homes] == [key]:
        return "it belongs to the top level"
    if homes:
        # Of many, none can be recommended.
        wanted = " or ".join(home.path for home in homes)
        return f"it belongs elsewhere, as {wanted}" if len(homes) < 3 else ""
    return _idle(found)


def _alike(path: Sequence[str], here: type[Block], model: type[Block]) -> str:
    """A remedy from the key that is spelled most like this one: of the same block, or much more like of another one."""
    same = {home.key: home for home in _homes(model) if home.block is here and home.accepted}
    other = {
        home.key: home
        for home in _homes(model)
        if home.block is not here and home.recommended and home.key != path[-1] and home.serves(path)
    }
    key = path[-1].lower()
    same, other = ({name: home for name, home in each.items() if not _opposed(key, name)} for each in (same, other))
    near = difflib.get_close_matches(key, other, n=1, cutoff=0.9)
    # Two of the same name are found in favour of this block.
    [best] = difflib.get_close_matches(key, [*same, *here.retired, *near], n=1, cutoff=0.75) or [""]
    if best in here.retired:
        return f"set {here.retired[best]} instead, which has taken the place of {best}"
    home = same.get(best) or other.get(best)
    if home is None:
        return ""
    if not home.recommended:
        return f"remove it: it looks like {best}, which has no effect in this version"
    if home is same.get(best):
        return f"did you mean {best!r}?"
    return f"did you mean {home.path!r}{'' if home.where else ' at the top level'}?"


def _opposed(one: str, other: str) -> bool:
    """Tell whether two names say opposite things, however much they are spelled alike."""
    words, others = set(one.split("_")), set(other.split("_"))
    only, instead = words - others, others - words
    return any(pair & only and pair & instead for pair in _OPPOSITES)


def _all_keys(here: type[Block]) -> str:
    wanted = [spellings(name, field)[0] for name, field in here.model_fields.items() if is_recommended(here, name)]
    return f"remove it, or use one of: {', '.join(wanted)}" if wanted else "remove it"


def _not_taken(path: Sequence[str], given: Mapping[str, object]) -> str:
    """A remedy for an argument at the wrong place that the optimizer or scheduler that is named does not take."""
    block, _, argument = place(path).partition(".params.")
    kind = _read(given, f"{block}.type")
    listed = _arguments(kind)
    return f"remove it: {kind} does not take {argument}" if argument and listed and argument not in listed else ""


def _arguments(kind: object) -> frozenset[str]:
    """Arguments of a type of optimizer or scheduler, none where they are not known."""
    return ARGUMENTS.get(str(kind)) or ARGUMENTS.get(str(kind).lower()) or frozenset()


def _beside_params(path: Sequence[str], here: type[Block], given: Mapping[str, object], model: type[Block]) -> str:
    """A remedy for a key of the ``optimizer`` or ``scheduler`` block that is none of its own."""
    key, inside = path[-1], f"{path[0]}.params"
    kind = _read(given, f"{path[0]}.type")
    listed = _arguments(kind)
    # Of another class any argument may be one.
    taken = listed or frozenset[str]().union(*ARGUMENTS.values())
    if key in taken:
        return f"it belongs into {inside}"
    # Another name of an argument, such as learning_rate, may mean nothing that this class takes.
    argument = place(path).removeprefix(f"{inside}.")
    if (told := meaning(path)) and (f"{inside}." not in told or argument in taken):
        return told
    if told := _switch(key, here, model) or _elsewhere(path, model) or by_words(key):
        return told
    paths = {**{argument: f"{inside}.{argument}" for argument in taken}, **{name: name for name in here.model_fields}}
    [near] = difflib.get_close_matches(key.lower(), paths, n=1, cutoff=0.75) or [""]
    if near:
        return f"did you mean {paths[near]!r}?"
    if listed:
        return f"remove it: {kind} does not take it"
    return f"remove it, or put it into {inside} if {kind or 'the type'} takes it"
