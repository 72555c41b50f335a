"""The dtype that each parameter is gathered in and computed with; and fingerprints, which show edits without a copy."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeropp.params.guard import own_dtype

__all__ = [
    "DTYPES",
    "ComputedWith",
    "DtypeOptions",
    "computed_with",
    "digest_of",
    "fingerprint",
    "keeps_float32",
]


ComputedWith = dict[str, tuple[nn.Parameter, torch.dtype]]
"""Parameters by name, each with the dtype it is computed with."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the configuration's names."""

# Those that DeepSpeed converts, too: their operation is one that autocast runs in 16 bits, and they have no other.
_SAFE = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


@dataclass(frozen=True)
class DtypeOptions:
    """The dtypes of weights, gradients and their messages.

    Attributes:
        compute: of the weights that the model computes with; None for the parameters' own.
        message: of plain gradients on their way; None for that of the weights.
        main_as_computed: main weights, gradient sums and states have the dtype of the weights, also where that has 16
            bits.
        autocast: that forwards are autocast to; None without autocast.
        autocast_classes: names of the classes of modules that convert their weights under autocast; None for torch's
            linear and convolutional layers.
        kept_float32: parts of the names of parameters that are computed with in float32 whatever ``compute`` is.
    """

    compute: torch.dtype | None = None
    message: torch.dtype | None = None
    main_as_computed: bool = False
    autocast: torch.dtype | None = None
    autocast_classes: tuple[str, ...] | None = None
    kept_float32: tuple[str, ...] = ()

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of main weights and gradient sums of trained parameters that are computed with in ``dtype``."""
        # As computed with, modules that are kept in float32 too.
        return dtype if self.main_as_computed else torch.promote_types(dtype, torch.float32)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of messages with gradients of parameters that are computed with in ``dtype``."""
        # float64 models are there for their precision, which the configured dtype would take away.
        return dtype if dtype == torch.float64 or self.message is None else self.message


def computed_with(model: nn.Module, options: DtypeOptions) -> ComputedWith:
    """Every parameter, and the dtype it is computed with.

    That of the options, or else the parameter's own. Under autocast, weights of modules that would convert them at each
    use are gathered converted: the bits are the same, and half the bytes travel.

    Args:
        model: wrapped or not.
        options: of the engine.
    """
    lower = _converted_by_autocast(model, options)
    found: ComputedWith = {}
    for name, parameter in model.named_parameters():
        # Its own, and not the parameter's: a model that is wrapped again has parameters in the compute dtype.
        own = own_dtype(parameter)
        dtype = options.compute or own
        # Of the blocks' doing alone: a model that was built in 16 bits has nothing to keep.
        if dtype != own and any(keeps_float32(part, name) for part in options.kept_float32):
            dtype = torch.float32
        elif options.autocast is not None and id(parameter) in lower and dtype == torch.float32:
            dtype = options.autocast
        found[name] = parameter, dtype
    return found


def keeps_float32(part: str, name: str) -> bool:
    """Tell whether ``part`` is among the parts of a parameter's name, one or several in a row."""
    return f".{part}." in f".{name}."


def _converted_by_autocast(model: nn.Module, options: DtypeOptions) -> set[int]:
    """Identities of parameters all of whose modules convert them under autocast."""
    if options.autocast is None:
        return set()
    given = options.autocast_classes
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
