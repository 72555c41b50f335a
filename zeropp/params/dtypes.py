"""The dtype in which each parameter is gathered and computed with, and fingerprints that reveal edits of a tensor."""

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
"""Type of a table from parameter names to pairs (parameter, dtype that the model computes with it in)."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Table from the dtype names of the configuration to torch dtypes."""

# The module classes that DeepSpeed converts, too. Autocast runs their operation in 16 bits, and they use their weights
# in no other operation.
_SAFE = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


@dataclass(frozen=True)
class DtypeOptions:
    """The dtypes of weights, gradients and gradient messages.

    Attributes:
        compute: dtype of the weights that the model computes with; None to keep each parameter's own dtype.
        message: dtype of unquantized gradient messages; None for the dtype of the weights.
        main_as_computed: True if main weights, gradient sums and optimizer states have the dtype of the weights even if
            that dtype has 16 bits; False if they have at least float32.
        autocast: dtype that forwards are autocast to; None without autocast.
        autocast_classes: names of the module classes that convert their weights under autocast; None for torch's linear
            and convolutional layers.
        kept_float32: parts of parameter names, such as "norm"; matching parameters are computed with in float32
            whatever ``compute`` is.
    """

    compute: torch.dtype | None = None
    message: torch.dtype | None = None
    main_as_computed: bool = False
    autocast: torch.dtype | None = None
    autocast_classes: tuple[str, ...] | None = None
    kept_float32: tuple[str, ...] = ()

    def main_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of main weights and gradient sums of trained parameters whose compute dtype is ``dtype``."""
        # With ``main_as_computed``, parameters that are kept in float32 have float32 main weights.
        return dtype if self.main_as_computed else torch.promote_types(dtype, torch.float32)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of unquantized gradient messages of parameters whose compute dtype is ``dtype``."""
        # A float64 model is used for its precision. Sending its gradients in ``message`` would lose that precision.
        return dtype if dtype == torch.float64 or self.message is None else self.message


def computed_with(model: nn.Module, options: DtypeOptions) -> ComputedWith:
    """Return every parameter with the dtype that the model computes with it in.

    The dtype is ``options.compute``, or else the parameter's own dtype. Under autocast, float32 weights that every
    module using them would convert at each use are gathered in the autocast dtype. The results have the same bits, and
    half the bytes travel.

    Args:
        model: model whose parameters are listed; it may have been wrapped before.
        options: dtype settings of the engine.

    Returns:
        Table from each parameter's name to the parameter and its dtype.
    """
    lower = _converted_by_autocast(model, options)
    found: ComputedWith = {}
    for name, parameter in model.named_parameters():
        # ``parameter.dtype`` is wrong for a model that is wrapped again: its parameters already have the compute dtype.
        own = own_dtype(parameter)
        dtype = options.compute or own
        # Keep float32 only if the configuration changes the dtype. A model that was built in 16 bits keeps its dtype.
        if dtype != own and any(keeps_float32(part, name) for part in options.kept_float32):
            dtype = torch.float32
        elif options.autocast is not None and id(parameter) in lower and dtype == torch.float32:
            dtype = options.autocast
        found[name] = parameter, dtype
    return found


def keeps_float32(part: str, name: str) -> bool:
    """Return True if ``part`` is one component of a dotted parameter name, or several components in a row."""
    return f".{part}." in f".{name}."


def _converted_by_autocast(model: nn.Module, options: DtypeOptions) -> set[int]:
    """Return the ids of parameters that autocast converts in every module that uses them."""
    if options.autocast is None:
        return set()
    given = options.autocast_classes
    safe = set[int]()
    other = set[int]()
    for module in model.modules():
        ids = {id(parameter) for parameter in module.parameters(recurse=False)}
        # Compare the exact class, because a subclass may use its weight in other operations.
        (safe if _is_named(type(module), _SAFE if given is None else given) else other).update(ids)
    # Leave out shared parameters that another kind of module uses too: an embedding tied to a Linear is read in
    # float32.
    return safe - other


def _is_named(kind: type, names: tuple[str, ...]) -> bool:
    """Return True if ``names`` contains a class by its full name, its name in ``torch.nn``, or its bare name."""
    full = f"{kind.__module__}.{kind.__qualname__}"
    # torch defines its layers in torch.nn.modules.linear and the like, but users write torch.nn.Linear.
    short = f"torch.nn.{kind.__qualname__}" if full.startswith("torch.nn.modules.") else full
    return bool({full, short, kind.__qualname__} & set(names))


def fingerprint(value: Tensor) -> tuple[object, ...]:
    """Return a tensor's shape, its dtype, and the sum over its bits read as integers.

    Edits change the sum, except edits that only exchange values between places, and rare coincidences.
    """
    # Sum bit patterns instead of values: a NaN is not equal to itself, and -0.0 equals 0.0 although its bits differ.
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[value.element_size()]
    total = int(value.detach().contiguous().view(-1).view(kind).sum(dtype=torch.int64)) if value.numel() else 0
    return tuple(value.shape), value.dtype, total


def digest_of(prints: Iterable[object]) -> int:
    """Return a checksum of the texts of some objects, for ranks to compare; never 0."""
    # Do not use hash(): Python seeds the hash of strings differently in every process.
    return 1 << 32 | zlib.crc32(repr(list(prints)).encode())
