"""Loading of a configuration from a dict, a JSON file or base64 into a checked `Config`, with errors and warnings.

A file may have comments and trailing commas; duplicate keys are errors. Pydantic's errors are converted to one line
each, with the given value, the expected values and a remedy. Warnings name values at "auto", a missing stage, and keys
without effect.
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
    """Read and check a configuration.

    This function does not check that this version implements all settings; `require_supported` does.

    Args:
        source: a mapping (not changed), the path of a JSON file (comments and trailing commas are allowed), a JSON
            object in url-safe base64, a `Config` (returned unchanged), or None for stage 3 and defaults.
        final: False to omit the warnings about "auto" values and keys without effect, because a trainer will fill in
            values and load the configuration again.

    Returns:
        The configuration as an immutable object.

    Raises:
        ConfigError: the configuration is invalid. The error lists all problems.
    """
    # A Config was checked when it was created.
    if isinstance(source, Config):
        return source
    given = {"zero_optimization": {"stage": 3}} if source is None else _read(source)
    if not isinstance(given, Mapping):
        # A base64 string has no file name and may be long, so show its first 80 characters.
        name = source if isinstance(source, str | os.PathLike) and os.path.exists(source) else cut(str(source))
        raise ConfigError(f"{name}: got {value_text(given):.80}; expected a JSON object at the top level")
    given, ignored = _without_ignored(without_comments(given))
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        # "from None" hides pydantic's error, which would repeat the same problems.
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
    # A str may be base64 if no such file exists. A path object always means a path.
    if isinstance(source, str) and not os.path.exists(path):
        return parse(_decoded(source), "base64 configuration")
    try:
        # utf-8-sig skips a byte order mark, which some editors write and the json module rejects.
        with open(path, encoding="utf-8-sig") as file:
            return parse(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected the path of a JSON file in UTF-8") from None


def _decoded(text: str) -> str:
    """Decode url-safe base64, with or without padding.

    Raises:
        ConfigError: the text is not base64 of a JSON object.
    """
    try:
        # Restore padding that may have been stripped. Without validate=True, the decoder skips invalid characters, so
        # that many paths would count as base64.
        decoded = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode("utf-8")
    except ValueError:
        decoded = ""
    # Short file names are often valid base64, so accept the decoded text only if it starts a JSON object.
    if not decoded.lstrip().startswith("{"):
        raise ConfigError(
            f"{cut(text)!r} is neither the path of an existing file nor base64 of a JSON object; "
            "check the path, or pass JSON text as json.loads(text)"
        )
    return decoded


def _without_ignored(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split off the top-level keys that DeepSpeed does not read, either.

    These are keys of other programs, and dotted keys such as ``"block.key"``. TRL writes dotted keys beside the block;
    their values may be invalid for the real key (0.9 * hidden_size**2 elements can be a fraction).

    Returns:
        The configuration without these keys, and a dict of these keys and their values.
    """
    blocks = {key for name, field in Config.model_fields.items() for key in spellings(name, field)}
    dotted = {key for key in given if isinstance(key, str) and "." in key and key.partition(".")[0] in blocks}
    ignored = {key: value for key, value in given.items() if key in dotted or key in FOREIGN}
    return {key: value for key, value in given.items() if key not in ignored}, ignored


# JSON with comments and trailing commas.

_STRING = r'("(?:[^"\\\n]|\\.)*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|\#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(_STRING + r"|(?<![\[{,:\s])(\s*),(?=\s*[}\]])")


def parse(text: str, origin: str) -> object:
    """Parse JSON with `//`, `#` and `/* */` comments and with commas before a closing bracket.

    Args:
        text: the JSON text.
        origin: source of the text, for error messages.

    Returns:
        The parsed value.

    Raises:
        ConfigError: the text is not valid JSON (with line and column), or an object has a duplicate key.
    """
    # The patterns match strings first, so comment signs inside strings do not count. Replace comments by blanks, so
    # that line and column numbers in errors stay correct.
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
        # The json module would silently use the last of the duplicate keys. Comment keys may appear twice.
        if key in result and not is_comment(key):
            raise ConfigError(f"{origin}: the key {key!r} is given twice, as {result[key]!r} and {value!r}; keep one")
        result[key] = value
    return result


# Conversion of pydantic's errors to lines with the given value, the expected values and a remedy.

Location = Sequence[int | str]


def problems(error: ValidationError, model: type[Block], given: Mapping[str, object]) -> list[str]:
    """Return one line for each problem. Each line starts with the path of the key as the user wrote it.

    Args:
        error: pydantic's error.
        model: class of the whole configuration.
        given: the configuration that failed validation.
    """
    return [_problem(details, model, given) for details in error.errors()]


def _problem(details: ErrorDetails, model: type[Block], given: Mapping[str, object]) -> str:
    path = ".".join(str(part) for part in details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{path}: unknown key; {_suggestion(details['loc'], model, given)}"
    if details["type"] == "value_error":
        # Use the validator's message; pydantic's text would add a prefix.
        message = str(details["ctx"]["error"])
        return f"{path}: {message}" if path else message
    field = _field(details["loc"], model)
    # Without a field, the rule is about a whole block or the top level.
    if field is None:
        return f"{path}: {details['msg']}, got {shortened(details['input'])}"
    return f"{path}: got {shortened(details['input'])}; expected {expected_text(field)}{_written_out(field, details)}"


def _written_out(field: FieldInfo, details: ErrorDetails) -> str:
    """Return advice for a single value in place of a block, such as `; write {"enabled": true}`; "" if none fits."""
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
    # For a block without a switch, use the reason that an "enabled" key inside it would get.
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
    """Return the field that an error is about; None if it is about a block.

    An error inside a list or a free-form object belongs to the field that holds it.
    """
    found = None
    for key in path:
        field = _by_key(model, key)
        if field is None:
            break
        found = field
        # After a field that is not a block, the path continues with list indices or user-defined keys. The model
        # stays the same, and the loop ends at the first key that is no field of it.
        model = nested_block(field) or model
    return found


# Remedies for unknown keys.

# Key names that many blocks use with different meanings. They are suggested only for blocks that are nested directly in
# the block of the unknown key.
_OF_ITS_BLOCK = frozenset(
    ["enabled", "type", "params", "dtype", "names", "classes", "local", "cross", "profile", "ratio"]
)


# Pairs of words with opposite meanings. Two names that differ in such a pair are not suggested for each other, however
# similar their spelling is.
_OPPOSITES = (
    {"min", "max"}, {"read", "write"}, {"first", "last"}, {"local", "cross"}, {"local", "global"}, {"micro", "global"},
    {"fp16", "bf16"}, {"fp16", "fp32"}, {"bf16", "fp32"}, {"weight", "gradient"}, {"weights", "gradients"},
    {"param", "optimizer"}, {"params", "optimizer"}, {"parameters", "optimizer"}, {"reduce", "gather"},
)  # fmt: skip


_SWITCHES = {"enabled", "enable", "is_enabled", "use", "active", "activate", "activated", "on"}


def _suggestion(path: Location, model: type[Block], given: Mapping[str, object]) -> str:
    """Return a remedy for an unknown key.

    The remedy comes from the tables of meanings, from a block that has a key of this name, from a key with similar
    spelling, or lists all keys of the block. It never recommends a key that is rejected or has no effect.
    """
    words = [str(part) for part in path]
    here = _block(path[:-1], model)
    if issubclass(here, NamedBlock):
        return _beside_params(words, here, given, model)
    return (
        # Meanings come first: a right key in the wrong block must not match a key of similar spelling in this block.
        _not_taken(words, given)
        or meaning(words)
        or _switch(words[-1], here, model)
        or _elsewhere(words, model)
        or by_words(words[-1])
        or _alike(words, here, model)
        or _all_keys(here)
    )


class _KeyLocation(NamedTuple):
    """One accepted key in one block.

    Attributes:
        key: the key.
        where: path of keys that leads to the block.
        block: class of the block.
        name: name of the field that the key sets.
    """

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
        """Return True if the unknown key at `path` may mean this key."""
        # A name such as "type" fits only if this key's block is nested directly in the block of the unknown key.
        return self.key not in _OF_ITS_BLOCK or self.where[:-1] == (*path[:-1],)


@functools.cache
def _homes(model: type[Block]) -> list[_KeyLocation]:
    return [
        _KeyLocation(key, where, block, name)
        for where, block in blocks(model)
        for name, field in block.model_fields.items()
        for key in spellings(name, field)
    ]


def _value_at(given: object, path: str) -> object:
    """Return the value that the user wrote at a dotted path; None if there is none."""
    for part in path.split("."):
        given = given.get(part) if isinstance(given, Mapping) else None
    return given


def _switch(key: str, here: type[Block], model: type[Block]) -> str:
    """Return a remedy for a switch such as "enable" in a block that does not have this key; "" for other keys."""
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


def _idle(homes: Sequence[_KeyLocation]) -> str:
    """Return a remedy for a key that matches only keys that are rejected or have no effect; "" if there are none."""
    if refused := [home for home in homes if not home.accepted]:
        why = SUPPORT[refused[0].block][refused[0].name].instead
        return f"remove it, since it is not in this version{f' ({why})' if why else ''}"
    return f"remove it, since {homes[0].path} has no effect in this version" if homes else ""


def _elsewhere(path: Sequence[str], model: type[Block]) -> str:
    """Return a remedy that names the blocks with a key of exactly this name; "" if there are none or too many."""
    key = path[-1]
    for where, block in blocks(model):
        if key in block.retired:
            return f"it is an old key of {'.'.join(where)}; set {block.retired[key]} there instead"
    found = [home for home in _homes(model) if home.key == key and home.serves(path)]
    homes = [home for home in found if home.recommended]
    if [home.path for home in homes] == [key]:
        return "it belongs to the top level"
    if homes:
        # With three or more blocks, none of them is a useful suggestion.
        wanted = " or ".join(home.path for home in homes)
        return f"it belongs elsewhere, as {wanted}" if len(homes) < 3 else ""
    return _idle(found)


def _alike(path: Sequence[str], here: type[Block], model: type[Block]) -> str:
    """Return a remedy that names the key with the most similar spelling; "" if none is similar enough.

    Keys of the same block need a similarity of 0.75. Keys of other blocks need 0.9.
    """
    same = {home.key: home for home in _homes(model) if home.block is here and home.accepted}
    other = {
        home.key: home
        for home in _homes(model)
        if home.block is not here and home.recommended and home.key != path[-1] and home.serves(path)
    }
    key = path[-1].lower()
    same, other = ({name: home for name, home in each.items() if not _opposed(key, name)} for each in (same, other))
    near = difflib.get_close_matches(key, other, n=1, cutoff=0.9)
    # Candidates of this block come first, so that they win over a key of the same name in another block.
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
    """Return True if two names differ in a pair of words with opposite meanings, such as "min" and "max"."""
    words = set(one.split("_"))
    others = set(other.split("_"))
    only = words - others
    instead = others - words
    return any(pair & only and pair & instead for pair in _OPPOSITES)


def _all_keys(here: type[Block]) -> str:
    wanted = [spellings(name, field)[0] for name, field in here.model_fields.items() if is_recommended(here, name)]
    return f"remove it, or use one of: {', '.join(wanted)}" if wanted else "remove it"


def _not_taken(path: Sequence[str], given: Mapping[str, object]) -> str:
    """Return a remedy for an argument that the configured optimizer or scheduler does not take; "" otherwise."""
    block, _, argument = place(path).partition(".params.")
    kind = _value_at(given, f"{block}.type")
    listed = _arguments(kind)
    return f"remove it: {kind} does not take {argument}" if argument and listed and argument not in listed else ""


def _arguments(kind: object) -> frozenset[str]:
    """Return the names of the arguments of an optimizer or scheduler type; an empty set for an unknown type."""
    return ARGUMENTS.get(str(kind)) or ARGUMENTS.get(str(kind).lower()) or frozenset()


def _beside_params(path: Sequence[str], here: type[Block], given: Mapping[str, object], model: type[Block]) -> str:
    """Return a remedy for an unknown key in the ``optimizer`` or ``scheduler`` block, beside ``params``."""
    key = path[-1]
    inside = f"{path[0]}.params"
    kind = _value_at(given, f"{path[0]}.type")
    listed = _arguments(kind)
    # The arguments of an unknown type are unknown, so any known argument may belong to it.
    taken = listed or frozenset[str]().union(*ARGUMENTS.values())
    if key in taken:
        return f"it belongs into {inside}"
    # The key may be another name of an argument (learning_rate). Check that this type takes that argument.
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


# Warnings about defaults that were chosen for the user: one for "auto" values, one for a missing stage.

_STAGE = ("zero_optimization", "stage")
_NOTHING = "partitions nothing; set 1, 2 or 3, or 0 to keep it"
# Weights keep the dtype of the model, so the message does not promise float32.
_OWN_TYPE = "so the model computes in its parameters' own type, float32 unless it was cast"


class _Auto(NamedTuple):
    # Dotted path of the key as the user wrote it.
    key: str
    # Names of the fields that lead to the field.
    path: tuple[str, ...]
    # Value that replaces "auto".
    chosen: object


def warn_of_choices(given: Mapping[str, object], config: Config, name: str) -> None:
    """Issue warnings about "auto" values and a missing stage, with the values that are used instead.

    Args:
        given: the configuration as the user wrote it.
        config: the checked configuration.
        name: name of the source, for the messages.
    """
    autos = list(_autos(given, config, "", ()))
    if autos:
        headline = f'{name} has "auto" where no trainer filled in a value, so the default is used'
        lines = [f"{auto.key}: {_chosen(auto, config)}" for auto in autos]
        notify_once(listing(headline, lines, "keys"))
    # The list above already names a stage at "auto".
    if "stage" not in config.zero.model_fields_set and _STAGE not in [auto.path for auto in autos]:
        notify_once(f"{name} does not set zero_optimization.stage, which is then 0 and {_NOTHING}")


def _autos(given: Mapping[str, object], block: Block, prefix: str, path: tuple[str, ...]) -> Iterator[_Auto]:
    # Include all accepted keys of each field, because the warning shows the key that the user wrote.
    fields = {key: name for name, field in type(block).model_fields.items() for key in spellings(name, field)}
    # Deprecated keys are not fields. Their own warnings have named them already.
    for key in (key for key in given if key in fields):
        value = given[key]
        chosen = getattr(block, fields[key])
        here = (*path, fields[key])
        # Skip fields for which "auto" is a regular value, such as zeropp.reduce_scatter.
        if is_auto(value) and chosen != value:
            yield _Auto(prefix + key, here, chosen)
        elif isinstance(value, Mapping) and isinstance(chosen, Block):
            yield from _autos(value, chosen, f"{prefix}{key}.", here)


def _chosen(auto: _Auto, config: Config) -> str:
    """Return the chosen value in words, with its consequence for keys where the value alone is unclear."""
    # A whole block would be too long to show.
    value = "its defaults" if isinstance(auto.chosen, Block) else value_text(auto.chosen)
    # Explain the compute dtype only if no setting selects one.
    own_type = not config.bf16.enabled and not config.fp16.enabled and config.data_types.param_dtype is None
    match auto.path:
        case ("bf16", "enabled") if own_type:
            return f"{value}, {_OWN_TYPE}; set true or false"
        case ("fp16", "enabled") if own_type:
            return f"{value}, {_OWN_TYPE}; enable bf16 for 16 bits, or set false"
        case ("zero_optimization", "stage"):
            return f"{value}, which {_NOTHING}"
        case ("gradient_clipping",):
            # Hugging Face's trainers would fill in 1.0. With the same file passed to zeropp directly there is no
            # clipping, so say that.
            return f"{value}, so no gradient is clipped (Hugging Face's trainers fill in 1.0)"
        case ("train_batch_size",) | ("train_micro_batch_size_per_gpu",):
            one_is_given = config.train_batch_size or config.train_micro_batch_size_per_gpu
            return "derived from the other two" if one_is_given else f"{value}, any size that your loop passes in"
        case ("gradient_accumulation_steps",):
            both_are_given = config.train_batch_size and config.train_micro_batch_size_per_gpu
            return "derived from the other two" if both_are_given else "1"
    return value


# Warnings of keys without effect.

# Keys that the warning never names: steps_per_print does not affect the training, and very many files have it.
_SILENT = ("steps_per_print",)


def warn_without_effect(given: Mapping[str, object], config: Config, ignored: Mapping[str, object], name: str) -> None:
    """Issue one warning that lists all keys without effect, and one for each setting that has no effect alone.

    Args:
        given: the configuration as the user wrote it.
        config: the checked configuration.
        ignored: keys that were split off before the check, with their values.
        name: name of the source, for the messages.
    """
    unread = {
        key: getattr(config, key)
        # Only the top level has keys of the kind UNREAD.
        for key, support in SUPPORT[Config].items()
        if support.kind is Kind.UNREAD and key not in _SILENT
    }
    keys = [key for key, value in {**unread, **ignored}.items() if not _changes_nothing(value)]
    if keys:
        # TRL writes dotted keys beside the block that they belong to.
        why = "; the keys of a block are read from inside that block only" if any("." in key for key in keys) else ""
        notify_once(f"these keys of {name} have no effect: {', '.join(keys)}{why}")
    for text in (*_ineffective_offload(given, config), *_ineffective_alone(config)):
        notify_once(text)


def _ineffective_offload(given: Mapping[str, object], config: Config) -> Iterator[str]:
    """Iterate over warnings about an `offload_param` device below stage 3.

    `config` has the device "none" in this case, so look at the configuration as the user wrote it.
    """
    zero = given.get("zero_optimization")
    if config.zero.stage == 3 or not isinstance(zero, Mapping):
        return
    block = zero.get("offload_param")
    device = block.get("device") if isinstance(block, Mapping) else "cpu" if zero.get("cpu_offload_param") else None
    if device not in (None, "none") and not is_auto(device):
        yield (
            f'zero_optimization.offload_param.device "{device}" has no effect in stage {config.zero.stage}: it applies '
            "to stage 3 only, as in DeepSpeed"
        )


def _ineffective_alone(config: Config) -> Iterator[str]:
    """Iterate over warnings about settings that have no effect, because another setting is missing."""
    zero = config.zero
    own = config.zeropp
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        if zero.stage < 3 and getattr(zero, key) > 1:
            yield f"zero_optimization.{key} {getattr(zero, key)} has no effect in stage {zero.stage}; set stage 3"
    for key in ("offload_optimizer", "offload_param"):
        block = getattr(zero, key)
        # A block with an explicit device "none" is intended, so warn only if the device is missing.
        if block is not None and block.model_fields_set and "device" not in block.model_fields_set:
            named = ", ".join(sorted(block.model_fields_set))
            yield f'{key}.{named} has no effect: {key}.device is not given; set it to "cpu" or "nvme"'
    quantized = zero.zero_quantized_weights or own.weight_codec == "int8"
    # Secondary shards of frozen weights can be codes, too.
    quantized |= zero.zero_quantized_nontrainable_weights
    if (quantized or own.weight_codec is not None) and zero.stage == 0:
        yield "weights are not encoded in stage 0, where they are never sent; set stage 1, 2 or 3"
    # Caching codes needs weights that are gathered as codes, and secondary shards to store them.
    if own.secondary == "codes" and not (quantized and zero.stage == 3 and zero.zero_hpz_partition_size > 1):
        yield (
            'zeropp.secondary "codes" has no effect; it needs stage 3, zero_quantized_weights and '
            "zero_hpz_partition_size"
        )
    # These keys configure the quantization of gradients, but do not switch it on.
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
        # Files often contain blocks that are switched off. Do not warn about them.
        return not switched_on(value)
    # Infinity as a number of steps between two messages means no messages.
    return not value or is_auto(value) or value == math.inf
