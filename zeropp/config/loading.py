"""Loading: from a dict, a file, JSON or base64 to a checked `Config`, with errors and warnings that name keys.

A file may have comments and trailing commas, and no key twice. pydantic's errors become lines that say what was given,
what was expected and what to do. Warnings tell of values at "auto", of the stage, and of keys without effect.
"""

from __future__ import annotations

import base64
import difflib
import functools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zeropp.config.base import Block, ConfigError, is_auto, listing, notify_once, spellings
from zeropp.config.blocks import NamedBlock
from zeropp.config.describe import blocks, cut, expected_text, nested_block, shortened, value_text
from zeropp.config.foreign_keys import (
    ARGUMENTS,
    FOREIGN,
    by_words,
    is_comment,
    meaning,
    meant_type,
    place,
    without_comments,
)
from zeropp.config.supported import SUPPORT, Kind, is_accepted, is_recommended, switched_on
from zeropp.config.top import Config

ConfigSource = Config | Mapping[str, Any] | str | os.PathLike[str] | None


def load_config(source: ConfigSource = None, *, final: bool = True) -> Config:
    """Reads and checks a configuration.

    `source` is a mapping, the path of a JSON file (comments and trailing commas are allowed), a JSON object
    in url-safe base64, a `Config`, which is returned as it is, or None, which is stage 3 with all other
    defaults. The source is not changed. With `final` false nothing is said of values at "auto" and of keys without
    effect: a trainer goes on to fill them in, and gives the configuration again.

    Raises ConfigError listing every problem found. Whether this version has what is asked for is a separate
    question, which `require_supported` answers.
    """
    # Checked when it was made.
    if isinstance(source, Config):
        return source
    given = {"zero_optimization": {"stage": 3}} if source is None else _read(source)
    if not isinstance(given, Mapping):
        # Base64 has no name, and may be long.
        name = source if isinstance(source, str | os.PathLike) and os.path.exists(source) else cut(str(source))
        raise ConfigError(f"{name}: got {value_text(given):.80}; expected a JSON object at the top level")
    given, ignored = _without_ignored(without_comments(given))
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        # Without pydantic's own error, which repeats all of it in other words.
        raise ConfigError(problems(error, Config, given)) from None
    named = isinstance(source, str | os.PathLike) and os.path.exists(source)
    name = str(source) if named else "the configuration"
    if final:
        warn_of_choices(given, config, name)
        warn_without_effect(given, config, ignored, name)
    return config


def _read(source: object) -> object:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"got {type(source).__name__} {source!r:.80}; expected a dict, a path, base64 of JSON, or None"
        )
    path = os.fspath(source)
    # A path object is meant as a path, also where nothing is there.
    if isinstance(source, str) and not os.path.exists(path):
        return parse(_decoded(source), "base64 configuration")
    try:
        # Some editors put a byte order mark in front, which json refuses.
        with open(path, encoding="utf-8-sig") as file:
            return parse(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected the path of a JSON file in UTF-8") from None


def _decoded(text: str) -> str:
    """The text behind url-safe base64, with or without its padding."""
    try:
        # Padding may have been stripped. Without validate, foreign characters would be skipped, and many paths would
        # pass for base64.
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        decoded = ""
    # Short names are often valid base64 of something; only an object can have been meant as a configuration.
    if not decoded.lstrip().startswith("{"):
        raise ConfigError(
            f"{cut(text)!r} is neither the path of an existing file nor base64 of a JSON object; "
            "check the path, or pass JSON text as json.loads(text)"
        )
    return decoded


def _without_ignored(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration without the keys that DeepSpeed does not read, either, and those keys.

    They are keys of other programs, and such as ``"block.key"``: TRL writes these beside the block, and its 0.9 h^2
    elements may be no whole number.
    """
    blocks = {key for name, field in Config.model_fields.items() for key in spellings(name, field)}
    dotted = {key for key in given if isinstance(key, str) and "." in key and key.partition(".")[0] in blocks}
    ignored = {key: value for key, value in given.items() if key in dotted or key in FOREIGN}
    return {key: value for key, value in given.items() if key not in ignored}, ignored


# JSON as people write it.

_STRING = r'("(?:[^"\\\n]|\\.)*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|\#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(_STRING + r"|(?<![\[{,:\s])(\s*),(?=\s*[}\]])")


def parse(text: str, origin: str) -> object:
    """Reads JSON with `//`, `#` and `/* */` comments and commas before a closing bracket.

    `origin` says where the text is from, for the error message. Raises ConfigError with line and column where
    the text is no JSON, and where an object has a key twice.
    """
    # Strings match first, so nothing inside them counts. Blanks keep every other character at its line and column.
    plain = _COMMENT.sub(lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), text)
    plain = _TRAILING_COMMA.sub(lambda found: found[1] or f"{found[2]} ", plain)
    try:
        return json.loads(plain, object_pairs_hook=lambda pairs: _unique(pairs, origin))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{origin}: line {error.lineno}, column {error.colno}: {error.msg}; expected JSON, "
            "in which comments and trailing commas are allowed"
        ) from None


def _unique(pairs: list[tuple[str, object]], origin: str) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        # json itself would take the last one, silently. A second comment is no contradiction.
        if key in result and not is_comment(key):
            raise ConfigError(f"{origin}: the key {key!r} is given twice, as {result[key]!r} and {value!r}; keep one")
        result[key] = value
    return result


# Errors of pydantic as lines that say what was given, what was expected and what to do.

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
    block = nested_block(field)
    value = details["input"]
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


# Remedies for unknown keys.

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


def _value_at(given: object, path: str) -> object:
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
    words = set(one.split("_"))
    others = set(other.split("_"))
    only = words - others
    instead = others - words
    return any(pair & only and pair & instead for pair in _OPPOSITES)


def _all_keys(here: type[Block]) -> str:
    wanted = [spellings(name, field)[0] for name, field in here.model_fields.items() if is_recommended(here, name)]
    return f"remove it, or use one of: {', '.join(wanted)}" if wanted else "remove it"


def _not_taken(path: Sequence[str], given: Mapping[str, object]) -> str:
    """A remedy for an argument at the wrong place that the optimizer or scheduler that is named does not take."""
    block, _, argument = place(path).partition(".params.")
    kind = _value_at(given, f"{block}.type")
    listed = _arguments(kind)
    return f"remove it: {kind} does not take {argument}" if argument and listed and argument not in listed else ""


def _arguments(kind: object) -> frozenset[str]:
    """Arguments of a type of optimizer or scheduler, none where they are not known."""
    return ARGUMENTS.get(str(kind)) or ARGUMENTS.get(str(kind).lower()) or frozenset()


def _beside_params(path: Sequence[str], here: type[Block], given: Mapping[str, object], model: type[Block]) -> str:
    """A remedy for a key of the ``optimizer`` or ``scheduler`` block that is none of its own."""
    key = path[-1]
    inside = f"{path[0]}.params"
    kind = _value_at(given, f"{path[0]}.type")
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


# Warnings of values that are left open: one for "auto", one for the stage.

_STAGE = ("zero_optimization", "stage")
_NOTHING = "partitions nothing; set 1, 2 or 3, or 0 to keep it"
# Weights keep the type that the model came with, so float32 cannot be promised.
_OWN_TYPE = "so the model computes in its parameters' own type, float32 unless it was cast"


class _Auto(NamedTuple):
    # As the user spelled it.
    key: str
    # The field and the blocks that lead to it.
    path: tuple[str, ...]
    chosen: object


def warn_of_choices(given: Mapping[str, object], config: Config, name: str) -> None:
    """Warns of what `config` has where `given`, from a source called `name`, leaves it open."""
    autos = list(_autos(given, config, "", ()))
    if autos:
        headline = f'{name} has "auto" where no trainer filled in a value, so the default is used'
        lines = [f"{auto.key}: {_chosen(auto, config)}" for auto in autos]
        notify_once(listing(headline, lines, "keys"))
    # A stage at "auto" has been named in the list above.
    if "stage" not in config.zero.model_fields_set and _STAGE not in [auto.path for auto in autos]:
        notify_once(f"{name} does not set zero_optimization.stage, which is then 0 and {_NOTHING}")


def _autos(given: Mapping[str, object], block: Block, prefix: str, path: tuple[str, ...]) -> Iterator[_Auto]:
    # By every spelling, since the warning repeats the user's own.
    fields = {key: name for name, field in type(block).model_fields.items() for key in spellings(name, field)}
    # Deprecated keys are no fields, and have warnings of their own.
    for key in (key for key in given if key in fields):
        value = given[key]
        chosen = getattr(block, fields[key])
        here = (*path, fields[key])
        # Some fields have "auto" for a value of their own.
        if is_auto(value) and chosen != value:
            yield _Auto(prefix + key, here, chosen)
        elif isinstance(value, Mapping) and isinstance(chosen, Block):
            yield from _autos(value, chosen, f"{prefix}{key}.", here)


def _chosen(auto: _Auto, config: Config) -> str:
    """The value in words, and what it means where the value alone would not tell."""
    # A whole block at "auto" is too long to be shown.
    value = "its defaults" if isinstance(auto.chosen, Block) else value_text(auto.chosen)
    # Only where no 16-bit type was chosen: if the other block is enabled, that answers for this one.
    own_type = not config.bf16.enabled and not config.fp16.enabled and config.data_types.param_dtype is None
    match auto.path:
        case ("bf16", "enabled") if own_type:
            return f"{value}, {_OWN_TYPE}; set true or false"
        case ("fp16", "enabled") if own_type:
            return f"{value}, {_OWN_TYPE}; enable bf16 for 16 bits, or set false"
        case ("zero_optimization", "stage"):
            return f"{value}, which {_NOTHING}"
        case ("gradient_clipping",):
            # Who passes a trainer's file to zeropp directly would silently lose the trainer's clipping.
            return f"{value}, so no gradient is clipped (Hugging Face's trainers fill in 1.0)"
        case ("train_batch_size",) | ("train_micro_batch_size_per_gpu",):
            one_is_given = config.train_batch_size or config.train_micro_batch_size_per_gpu
            return "derived from the other two" if one_is_given else f"{value}, any size that your loop passes in"
        case ("gradient_accumulation_steps",):
            both_are_given = config.train_batch_size and config.train_micro_batch_size_per_gpu
            return "derived from the other two" if both_are_given else "1"
    return value


# Warnings of keys without effect.

# How often progress is printed is no matter of what is trained, and every second file says it.
_SILENT = ("steps_per_print",)


def warn_without_effect(given: Mapping[str, object], config: Config, ignored: Mapping[str, object], name: str) -> None:
    """Warns once, naming all keys that are set but that nothing reads.

    Args:
        given: the configuration as the user wrote it.
        config: made of it.
        ignored: keys that were left out of `config`, with their values.
        name: where it was loaded from.
    """
    unread = {
        key: getattr(config, key)
        # The top level alone has keys of this kind.
        for key, support in SUPPORT[Config].items()
        if support.kind is Kind.UNREAD and key not in _SILENT
    }
    keys = [key for key, value in {**unread, **ignored}.items() if not _changes_nothing(value)]
    if keys:
        # Such as TRL writes beside the block.
        why = "; what belongs in a block is read from inside that block only" if any("." in key for key in keys) else ""
        notify_once(f"these keys of {name} have no effect: {', '.join(keys)}{why}")
    for text in (*_ineffective_offload(given, config), *_ineffective_alone(config)):
        notify_once(text)


def _ineffective_offload(given: Mapping[str, object], config: Config) -> Iterator[str]:
    """A device for weights in a stage in which they have none: the block in `config` has "none" in place of it."""
    zero = given.get("zero_optimization")
    if config.zero.stage == 3 or not isinstance(zero, Mapping):
        return
    block = zero.get("offload_param")
    device = block.get("device") if isinstance(block, Mapping) else "cpu" if zero.get("cpu_offload_param") else None
    if device not in (None, "none") and not is_auto(device):
        yield (
            f'zero_optimization.offload_param.device "{device}" has no effect in stage {config.zero.stage}: it acts in '
            "stage 3 alone, as in DeepSpeed"
        )


def _ineffective_alone(config: Config) -> Iterator[str]:
    """Settings that have an effect only together with others, which are not set."""
    zero = config.zero
    own = config.zeropp
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        if zero.stage < 3 and getattr(zero, key) > 1:
            yield f"zero_optimization.{key} {getattr(zero, key)} has no effect in stage {zero.stage}; set stage 3"
    for key in ("offload_optimizer", "offload_param"):
        block = getattr(zero, key)
        # One that says "none" means it.
        if block is not None and block.model_fields_set and "device" not in block.model_fields_set:
            named = ", ".join(sorted(block.model_fields_set))
            yield f'{key}.{named} has no effect: {key}.device is not given; set it to "cpu" or "nvme"'
    quantized = zero.zero_quantized_weights or own.weight_codec == "int8"
    # A secondary shard of frozen weights can be codes, too.
    quantized |= zero.zero_quantized_nontrainable_weights
    if (quantized or own.weight_codec is not None) and zero.stage == 0:
        yield "weights are not encoded in stage 0, where they are never sent; set stage 1, 2 or 3"
    # Codes are cached where there are both: codes that arrive, and a secondary shard for them.
    if own.secondary == "codes" and not (quantized and zero.stage == 3 and zero.zero_hpz_partition_size > 1):
        yield (
            'zeropp.secondary "codes" has no effect; it needs stage 3, zero_quantized_weights and '
            "zero_hpz_partition_size"
        )
    # These only say how gradients are quantized, not that they are.
    if not zero.zero_quantized_gradients:
        given = {
            "zero_optimization.zeropp_loco_param": zero.zeropp_loco_param is not None,
            "zeropp.hadamard": own.hadamard,
            "zeropp.gradient_bits": own.gradient_bits is not None,
        }
        for key in (key for key, is_given in given.items() if is_given):
            yield f"{key} has no effect without zero_quantized_gradients"
    if own.feedback == "both" and zero.zeropp_loco_param is None:
        yield 'zeropp.feedback "both" has no effect without zeropp_loco_param'


def _changes_nothing(value: object) -> bool:
    if isinstance(value, Mapping):
        # Files carry whole blocks that are switched off; to warn of them would be noise.
        return not switched_on(value)
    # Infinite steps between two messages are none.
    return not value or is_auto(value) or value == math.inf
