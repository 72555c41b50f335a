"""The dtype that each parameter is gathered in and computed with; and fingerprints, which show edits without a copy."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zeropp.config import Config
from zeropp.params.guard import own_dtype

__all__ = [
    "DTYPES",
    "ComputedWith",
    "autocast_dtype",
    "compute_dtype",
    "computed_with",
    "digest_of",
    "fingerprint",
    "keeps_float32",
    "main_dtype",
]


ComputedWith = dict[str, tuple[nn.Parameter, torch.dtype]]
"""Parameters by name, each with the dtype it is computed with."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the configuration's names."""

# Those that DeepSpeed converts, too: their operation is one that autocast runs in 16 bits, and they have no other.
_SAFE = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


def compute_dtype(config: Config) -> torch.dtype | None:
    """The dtype that the configuration has the model computed in; None for the parameters' own."""
    if config.fp16.enabled:
        return torch.float16
    if config.bf16.enabled:
        return torch.bfloat16
    # Under a block that is enabled it is refused if it says anything else.
    named = config.data_types.param_dtype
    return None if named is None else DTYPES[named]


def main_dtype(dtype: torch.dtype, config: Config) -> torch.dtype:
    """The dtype of main weights and gradient sums of trained parameters that are computed with in ``dtype``."""
    # As computed with, modules that are kept in float32 too.
    return dtype if config.main_in_16_bits else torch.promote_types(dtype, torch.float32)


def autocast_dtype(config: Config) -> torch.dtype:
    """The dtype that forwards are autocast to."""
    return DTYPES[config.torch_autocast.dtype]


def computed_with(model: nn.Module, config: Config) -> ComputedWith:
    """Every parameter, and the dtype it is computed with.

    That of the ``bf16`` or ``fp16`` block, or of ``param_dtype``, but for ``keep_in_fp32_modules``; else the
    parameter's own. Under autocast, weights of modules that would convert them at each use are gathered converted: the
    bits are the same, and half the bytes travel.

    Args:
        model: wrapped or not.
        config: of the engine.
    """
    lower = _converted_by_autocast(model, config)
    kept = config.data_types.keep_in_fp32_modules or ()
    found: ComputedWith = {}
    for name, parameter in model.named_parameters():
        # Its own, and not the parameter's: a model that is wrapped again has parameters in the compute dtype.
        own = own_dtype(parameter)
        dtype = compute_dtype(config) or own
        # Of the blocks' doing alone: a model that was built in 16 bits has nothing to keep.
        if dtype != own and any(keeps_float32(part, name) for part in kept):
            dtype = torch.float32
        elif id(parameter) in lower and dtype == torch.float32:
            dtype = autocast_dtype(config)
        found[name] = parameter, dtype
    return found


def keeps_float32(part: str, name: str) -> bool:
    """Tell whether ``part`` is among the parts of a parameter's name, one or several in a row."""
    return f".{part}." in f".{name}."


def _converted_by_autocast(model: nn.Module, config: Config) -> set[int]:
    """Identities of parameters all of whose modules convert them under autocast."""
    if not config.torch_autocast.enabled:
        return set()
    given = config.torch_autocast.lower_precision_safe_modules
    safe = set[int]()
    other = set[int]()
    for module in model.modules():
        ids = {id(parameter) for parameter in module.parameters(recurse=False)}
        # By class and not by instance: what a subclass does with its weight is its own.
        (safe if _is_named(type(module), _SAFE if given is None else given) else other).update(ids)
    # A table that is tied to a Linear is looked up in float32.
    return safe - other


def _is_named(kind: type, names: tuple[str, ...]) -> bool:
    full = f"{kind.__module__}.{kind.__qualname__}"
    # torch's own classes live in torch.nn.modules.linear and the like, and nobody writes that.
    short = f"torch.nn.{kind.__qualname__}" if full.startswith("torch.nn.modules.") else full
    return bool({full, short, kind.__qualname__} & set(names))


def fingerprint(value: Tensor) -> tuple[object, ...]:
    """Shape, dtype and a sum over the bits, which an edit changes unless it only exchanges values."""
    # Bits, since a NaN is not equal to itself, and -0.0 is to 0.0.
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[value.element_size()]
    total = int(value.detach().contiguous().view(-1).view(kind).sum(dtype=torch.int64)) if value.numel() else 0
    return tuple(value.shape), value.dtype, total


def digest_of(prints: Iterable[object]) -> int:
    """One number for all of what ranks compare, never 0; equal on ranks that have the same."""
    # Not hash(): of strings it is another number in every process.
    return 1 << 32 | zlib.crc32(repr(list(prints)).encode())
