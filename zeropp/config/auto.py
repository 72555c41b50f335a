"""Warnings of values that a configuration leaves open: one for `"auto"`, one for the stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zeropp.config.base import Block, is_auto, notify_once, spellings
from zeropp.config.describe import value_text
from zeropp.config.errors import listing
from zeropp.config.top import Config

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
        value, chosen, here = given[key], getattr(block, fields[key]), (*path, fields[key])
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
