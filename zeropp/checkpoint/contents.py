"""One rank's contents of a checkpoint: its parts of tensors, the job's values, and values of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.access.average import Average
from zeropp.checkpoint.averages import average_parts
from zeropp.checkpoint.checksums import Checksums
from zeropp.checkpoint.coded import CODES, SCALES, coded_entries, coded_parts
from zeropp.checkpoint.disk import view_of
from zeropp.checkpoint.dtypes import as_bytes, dtype_code
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.metadata import CodedEntry
from zeropp.checkpoint.names import has_extra_state, model_names
from zeropp.checkpoint.parts import BASES, MODEL, STATE, Part, base_parts, main_parts, state_parts, whole
from zeropp.checkpoint.random_state import random_state
from zeropp.checkpoint.values import encode
from zeropp.engine.engine import Engine
from zeropp.optimizer.slices import Slice
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["Contents", "add_extra", "contents", "of_rank"]


@dataclass
class Contents:
    """One rank's share of a checkpoint.

    Attributes:
        parts: it writes.
        shapes: every tensor of the model by name, with dtype; also those of which no rank has elements.
        aliases: further names of the model's tensors, and the name that each is there under.
        coded: tensors of the model that exist in codes.
        values: of the job, the same on every rank.
        own: of this rank.
        states: what the caller gives besides; see :func:`add_extra`.
        digest: of that.
    """

    parts: list[Part] = field(default_factory=list)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    coded: dict[str, CodedEntry] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


def of_rank(rank: int, name: str) -> str:
    """Name of a tensor that one rank has for itself."""
    return f"zeropp.rank.{rank}.{name}"


def contents(
    engine: Engine,
    model: nn.Module,
    optimizer: ZeroOptimizer | None,
    extra: Mapping[str, Any],
    checks: Checksums,
    *,
    trained_only: bool = False,
) -> Contents:
    """Collect everything, or all but frozen parameters; local, but for the ``state_dict`` of an extra object.

    Raises:
        CheckpointError: something is of a kind that checkpoints cannot keep.
    """
    found = Contents()
    _add_model(found, engine, model)
    if trained_only:
        _leave_out_frozen(found, model)
    if optimizer is not None:
        _add_optimizer(found, engine, optimizer)
    tensors: dict[str, Tensor] = {}
    found.own["random"] = encode(random_state(engine.device), of_rank(engine.comm.rank, "random"), tensors)
    found.parts += [whole(name, tensor) for name, tensor in tensors.items()]
    found.states = {name: _state_of(name, value) for name, value in extra.items()}
    for name, value in extra.items():
        if isinstance(value, Average):
            value.require_of(engine)
            found.parts += average_parts(value, name, "own")
    found.digest = _digest(found.states, checks)
    for part in found.parts:
        # Before anything is copied or written.
        dtype_code(part.values.dtype, part.name)
    return found


def _add_model(found: Contents, engine: Engine, model: nn.Module) -> None:
    named, found.aliases = model_names(model)
    first = engine.comm.rank == 0
    mains = {n: b.main_dtype for b in engine.buffers for n in b.names}
    found.coded = coded_entries(engine)
    for name, tensor in named.items():
        if name in found.coded:
            continue
        found.shapes[MODEL + name] = mains.get(name, tensor.dtype), tuple(tensor.shape)
        # Whole on every rank: buffers, and parameters that are not floating point.
        if name not in mains and first:
            found.parts.append(whole(MODEL + name, tensor.detach()))
    found.parts += main_parts(engine, "own")
    found.parts += coded_parts(engine, "own")
    found.parts += base_parts(engine, "own")
    states: dict[str, Any] = {}
    for path, module in model.named_modules():
        if has_extra_state(module):
            states[path] = module.get_extra_state()
    if states:
        tensors: dict[str, Tensor] = {}
        found.values["modules"] = encode(states, "modules", tensors)
        found.parts += [whole(name, tensor) for name, tensor in tensors.items()] if first else []


def _leave_out_frozen(found: Contents, model: nn.Module) -> None:
    """Take frozen parameters out again, and say which they are: whoever loads this has them from elsewhere."""
    named, _ = model_names(model)
    left = {name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and not tensor.requires_grad}
    gone = {prefix + name for name in left for prefix in (MODEL, BASES, CODES, SCALES)}
    found.parts = [part for part in found.parts if part.name not in gone]
    found.shapes = {name: shape for name, shape in found.shapes.items() if name not in gone}
    found.aliases = {alias: name for alias, name in found.aliases.items() if name not in left}
    found.coded = {name: entry for name, entry in found.coded.items() if name not in left}
    found.values["left_out"] = sorted(left)


def _add_optimizer(found: Contents, engine: Engine, optimizer: ZeroOptimizer) -> None:
    slices = optimizer.slices
    rows: list[tuple[Slice, str, Tensor]] = []
    numbers: dict[str, dict[str, Any]] = {}
    single = _single(optimizer)
    for part in slices.cut:
        for key, value in optimizer.inner.state.get(part.parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == part.parameter.shape and key not in single:
                rows.append((part, key, value))
            # Of one number, the same wherever the parameter is: the rank that has its first element tells it.
            elif part.start == 0 and _is_first_replica(engine):
                _add_number(found, numbers, part.name, key, value)
    found.parts += state_parts(engine, rows, "own")
    found.own["numbers"] = numbers
    # Whole on every rank, since nothing of theirs is spread.
    if engine.comm.rank == 0:
        for name, state in slices.frozen_states().items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    found.parts.append(whole(f"{STATE}{name}.{key}", value))
                else:
                    _add_number(found, numbers, name, key, value)
    found.values["groups"] = list(_groups(found, engine, optimizer))
    found.values["optimizer"] = type(optimizer.inner).__qualname__
    found.values["skipped_steps"] = optimizer.outcome.count()
    found.values["loss_scale"] = engine.reductions.loss_scale.state_dict()
    carried = optimizer.carried.state_dict()
    tensors: dict[str, Tensor] = {}
    found.own["carried"] = encode(carried, of_rank(engine.comm.rank, "carried"), tensors)
    found.parts += [whole(name, tensor) for name, tensor in tensors.items()]


def _single(optimizer: ZeroOptimizer) -> set[str]:
    """Names of states of one element, shape [1], that are no parts of a parameter's, as counts of steps may be."""
    # A slice of one element does not tell; what other slices have under the name does.
    return {
        key
        for part in optimizer.slices.cut
        if part.parameter.numel() != 1
        for key, value in optimizer.inner.state.get(part.parameter, {}).items()
        if isinstance(value, Tensor) and value.numel() == 1
    }


def _is_first_replica(engine: Engine) -> bool:
    """Tell whether this rank, of several with the same states, is the one that saves their numbers."""
    chain = engine.mode.chain
    return chain.slice_index(engine.comm.rank, chain.world) % (chain.world // engine.mode.states) == 0


def _add_number(found: Contents, numbers: dict[str, dict[str, Any]], name: str, key: str, value: object) -> None:
    """A state that a parameter has once, such as its count of steps."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise CheckpointError(
            f"the optimizer's state {key!r} of {name!r} has shape {tuple(value.shape)}; expected one element for each "
            "of the parameter's, or one number"
        )
    tensors: dict[str, Tensor] = {}
    numbers.setdefault(name, {})[key] = encode(value, f"{STATE}{name}.{key}", tensors)
    found.parts += [whole(each, tensor) for each, tensor in tensors.items()]


def _groups(found: Contents, engine: Engine, optimizer: ZeroOptimizer) -> Iterator[dict[str, Any]]:
    names = {id(p): name for buffer in engine.buffers for name, p in zip(buffer.names, buffer.parameters, strict=True)}
    for index, (group, given) in enumerate(zip(optimizer.param_groups, optimizer.slices.given, strict=True)):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        tensors: dict[str, Tensor] = {}
        encoded = encode(settings, f"optimizer.group.{index}", tensors)
        if engine.comm.rank == 0:
            found.parts += [whole(name, tensor) for name, tensor in tensors.items()]
        yield {"parameters": [names[id(p)] for p in given if id(p) in names], "settings": encoded}


def _digest(states: Mapping[str, Any], checks: Checksums) -> str:
    """A digest of what the caller gives besides: equal where ranks give the same."""
    tensors: dict[str, Tensor] = {}
    summed = [json.dumps(encode(states, "extra", tensors)).encode()]
    for name, tensor in tensors.items():
        row = as_bytes(tensor.cpu().contiguous())
        summed.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {checks.of_bytes(view_of(row))}".encode())
    return checks.hexdigest(b"\n".join(summed))


def add_extra(found: Contents, rank: int, first: str) -> None:
    """Add what the caller gives besides: the first rank's, and of others what differs from that.

    Args:
        found: of this rank.
        rank: this one.
        first: the first rank's digest.
    """
    tensors: dict[str, Tensor] = {}
    if rank == 0:
        found.values["extra"] = encode(found.states, "extra", tensors)
    elif found.digest != first:
        found.own["extra"] = encode(found.states, of_rank(rank, "extra"), tensors)
    found.parts += [whole(name, tensor) for name, tensor in tensors.items()]


def _state_of(name: str, value: Any) -> Any:
    """The value that a checkpoint keeps of one extra object: its ``state_dict()``, or the object itself."""
    if isinstance(value, Average):
        # Its pieces are spread as weights are, and saved so: see :func:`average_parts`.
        return value.counts()
    if callable(getattr(value, "state_dict", None)):
        if not callable(getattr(value, "load_state_dict", None)):
            raise CheckpointError(
                f"extra[{name!r}], a {type(value).__qualname__}, has state_dict but no load_state_dict"
            )
        return value.state_dict()
    return value
