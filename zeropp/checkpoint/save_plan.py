"""One rank's contents of a checkpoint: its parts of tensors, the job's values, and values of its own.

The model's names become the checkpoint's names. Averages of the weights in ``extra`` are sharded as weights are.
Each rank has random number generators of its own: torch's on the CPU and on the model's device, Python's, and
numpy's if it is in use.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp.access.average import Average
from zeropp.checkpoint.boxes import (
    BASES,
    MODEL,
    STATE,
    Box,
    CheckpointError,
    TensorBox,
    Which,
    as_bytes,
    base_parts,
    dtype_code,
    fragments,
    main_parts,
    parts_of_row,
    state_parts,
    whole,
)
from zeropp.checkpoint.files import view_of
from zeropp.checkpoint.metadata import (
    Checksums,
    CodedEntry,
    Metadata,
    comparable,
    encode,
)
from zeropp.checkpoint.tensor_reader import CODES, SCALES, TensorReader
from zeropp.config.base import warn_user
from zeropp.engine.engine import Engine
from zeropp.optimizer.sharded_params import Slice
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.params.coded_buffer import CodedBuffer
from zeropp_kernels.wire import BLOCK

__all__ = [
    "SavePlan",
    "add_extra",
    "average_parts",
    "averages_of",
    "coded_entries",
    "coded_parts",
    "compare",
    "contents",
    "draw_anew",
    "fill_in",
    "has_extra_state",
    "match",
    "match_groups",
    "model_names",
    "of_rank",
    "prefix_of",
    "random_state",
    "require_ours",
    "restore_random_state",
    "unfreeze",
]


def model_names(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Parameters and persistent buffers by first name, and all other names of tied ones with that."""
    first: dict[int, str] = {}
    named: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *kept.items()):
            if tensor is None:
                continue
            name = first.setdefault(id(tensor), prefix + key)
            named.setdefault(name, tensor)
            if name != prefix + key:
                aliases[prefix + key] = name
    return named, aliases


def has_extra_state(module: nn.Module) -> bool:
    """Tell whether a module has a state besides tensors; torch's own test."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def match(named: Mapping[str, Tensor], aliases: Mapping[str, str], metadata: Metadata) -> dict[str, str]:
    """The checkpoint's name of each of the model's tensors that it has.

    What is tied here may have been apart there, and the other way round: any name will do.

    Args:
        named, aliases: of :func:`model_names`.
        metadata: of the checkpoint.
    """
    further: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        further.setdefault(first, []).append(alias)
    found: dict[str, str] = {}
    for name in named:
        for each in (name, *further.get(name, ())):
            there = metadata.aliases.get(each, each)
            if metadata.shape_of(there) is not None:
                found[name] = there
                break
    return found


def compare(
    named: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    matched: Mapping[str, str],
    metadata: Metadata,
    strict: bool,
) -> tuple[list[str], list[str]]:
    """The model's tensors that the checkpoint does not have, and the other way round.

    Args:
        named, aliases: of :func:`model_names`.
        matched: of :func:`match`.
        metadata: of the checkpoint.
        strict: refuse both.

    Raises:
        CheckpointError: refused; or a tensor has another shape.
    """
    saved = {name.removeprefix(MODEL) for name in metadata.tensors if name.startswith(MODEL)} | metadata.coded.keys()
    missing = [name for name in named if name not in matched]
    # Others save tied tensors under every name; here one that has a name of its own was apart.
    apart = sorted(saved.intersection(aliases).difference(matched.values())) if metadata.world else []
    unexpected = sorted(saved.difference(named, aliases, matched.values()))
    # What was frozen there and is here comes from elsewhere; what is trained here has been somewhere by then.
    said = metadata.values.get("left_out", [])
    left_out = {name for name in said if name in named and not named[name].requires_grad}
    wanted = [name for name in missing if name not in left_out]
    if strict and (wanted or unexpected or apart):
        why = ", which were frozen and left out when it was saved" if set(wanted) & set(said) else ""
        lacks = [f"the checkpoint has no {_list(wanted)}{why}"] if wanted else []
        lacks += [f"the model has no {_list(unexpected)}"] if unexpected else []
        lacks += [f"{_list(apart)} is tied to {aliases[apart[0]]!r} here, and was not there"] if apart else []
        raise CheckpointError(
            f"model and checkpoint differ: {', and '.join(lacks)}. strict=False leaves them as they are"
        )
    wrong = []
    for name, there in matched.items():
        here = tuple(named[name].shape)
        shape = metadata.shape_of(there)
        if here != shape:
            wrong.append(f"{name!r} is of shape {here} here and of {shape} there")
    if wrong:
        raise CheckpointError(f"it is a checkpoint of another model: {'; '.join(wrong[:5])}")
    return missing, sorted(unexpected + apart)


def match_groups(
    optimizer: ZeroOptimizer, named: Mapping[str, Tensor], matched: Mapping[str, str], source: TensorReader
) -> tuple[list[dict[str, Any]], list[str]]:
    """Settings for each group, encoded, as the checkpoint has them for its parameters; and trained ones without states.

    Args:
        optimizer: whose groups they are.
        named: of :func:`model_names`.
        matched: of :func:`match`.
        source: of the checkpoint; settings that are tensors are read where they have to be compared.

    Raises:
        CheckpointError: parameters that are one group here had different settings there.
    """
    metadata = source.metadata
    groups = metadata.values["groups"]
    saved = {name: index for index, group in enumerate(groups) for name in group["parameters"]}
    names = {id(tensor): name for name, tensor in named.items()}
    stepped = {name.removeprefix(STATE).rpartition(".")[0] for name in metadata.tensors if name.startswith(STATE)}
    found = []
    fresh = []
    for number, given in enumerate(optimizer.slices.given):
        own = [names[id(parameter)] for parameter in given if id(parameter) in names]
        # By its own name where the checkpoint has left it out.
        there = {name: saved[matched.get(name, name)] for name in own if matched.get(name, name) in saved}
        # An optimizer may keep no states at all.
        trained = [name for name in own if stepped and named[name].requires_grad and named[name].numel()]
        fresh += [name for name in trained if matched.get(name) not in stepped]
        settings = [groups[index]["settings"] for index in dict.fromkeys(there.values())]
        if len(settings) > 1 and len({comparable(each, source.tensor) for each in settings}) > 1:
            raise CheckpointError(
                f"parameters of group {number} were in groups {sorted(set(there.values()))} with different settings "
                "when they were saved; put them into groups as they were, or load without the optimizer"
            )
        found.append(settings[0] if settings else {})
    return found, fresh


def _list(names: list[str]) -> str:
    return f"{', '.join(map(repr, names[:5]))}{f' and {len(names) - 5} more' if names[5:] else ''}"


def prefix_of(name: str) -> str:
    """Prefix of the tensors of an average that is given under a name. With quotes, so that none continues another."""
    return f"zeropp.average.{name!r}."


def average_parts(average: Average, name: str, which: Which) -> Iterator[TensorBox]:
    """An average, of this rank's pieces, under the name that it is given under."""
    for buffer, piece in average.take_pieces().items():
        yield from parts_of_row(buffer, piece, buffer.placement.mode.states, prefix_of(name), which)


def averages_of(engine: Engine, extra: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Average]:
    """Those among objects to restore, by name.

    Args:
        engine: whose averages they have to be.
        extra: the objects.
        saved: what the checkpoint has, by name.

    Raises:
        CheckpointError: it has something else under an average's name.
        ValueError: one is another model's.
    """
    found = {name: each for name, each in extra.items() if isinstance(each, Average) and name in saved}
    for name, average in found.items():
        average.require_of(engine)
        if not isinstance(saved[name], dict) or saved[name].keys() != average.counts().keys():
            raise CheckpointError(f"extra[{name!r}] is an average of the weights here, and was none when it was saved")
    return found


@torch.no_grad()
def fill_in(average: Average, name: str, renamed: Mapping[str, str], metadata: Metadata) -> None:
    """Begin anew, with the weights of now, where the checkpoint has no average: of what was frozen then.

    Args:
        average: that was read as far as it is there.
        name: that it is given under.
        renamed: names of parameters in the checkpoint.
        metadata: of the checkpoint.
    """
    for buffer, piece in average.take_pieces().items():
        for slot, each in fragments(buffer, buffer.placement.mode.states, "slice"):
            if prefix_of(name) + renamed.get(slot.name, "") not in metadata.tensors:
                place = slice(each.offset, each.offset + each.stop - each.start)
                piece[place].copy_(buffer.shard[place])


def random_state(device: torch.device) -> dict[str, Any]:
    """States of all of them, as values a checkpoint can keep; and the seed that torch's began with."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    # Where nobody has imported it, nobody draws from it.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # A dict, of whatever kind of generator there is.
        state["numpy"] = numpy.random.get_state(legacy=False)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from states of the same rank."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        _restore_numpy(state["numpy"], state["seed"])


def _restore_numpy(state: dict[str, Any], seed: int) -> None:
    import numpy

    here, there = numpy.random.get_state(legacy=False)["bit_generator"], state["bit_generator"]
    if here == there:
        numpy.random.set_state(state)
        return
    warn_user(f"numpy's generator was a {there} when it was saved, and is a {here} here; it begins anew")
    numpy.random.seed(seed % 2**32)


def draw_anew(state: dict[str, Any], rank: int, world: int) -> None:
    """Begin with a seed made of the saved one, the rank and the number of ranks: each rank has another, every time."""
    seed = (int(state["seed"]) * 1_000_003 + rank * 8191 + world) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@dataclass
class SavePlan:
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

    parts: list[TensorBox] = field(default_factory=list)
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
) -> SavePlan:
    """Collect everything, or all but frozen parameters; local, but for the ``state_dict`` of an extra object.

    Raises:
        CheckpointError: something is of a kind that checkpoints cannot keep.
    """
    found = SavePlan()
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


def _add_model(found: SavePlan, engine: Engine, model: nn.Module) -> None:
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


def _leave_out_frozen(found: SavePlan, model: nn.Module) -> None:
    """Take frozen parameters out again, and say which they are: whoever loads this has them from elsewhere."""
    named, _ = model_names(model)
    left = {name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and not tensor.requires_grad}
    gone = {prefix + name for name in left for prefix in (MODEL, BASES, CODES, SCALES)}
    found.parts = [part for part in found.parts if part.name not in gone]
    found.shapes = {name: shape for name, shape in found.shapes.items() if name not in gone}
    found.aliases = {alias: name for alias, name in found.aliases.items() if name not in left}
    found.coded = {name: entry for name, entry in found.coded.items() if name not in left}
    found.values["left_out"] = sorted(left)


def _add_optimizer(found: SavePlan, engine: Engine, optimizer: ZeroOptimizer) -> None:
    slices = optimizer.slices
    rows: list[tuple[Slice, str, Tensor]] = []
    numbers: dict[str, dict[str, Any]] = {}
    single = _single(optimizer)
    for part in slices.all:
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
    found.values["skipped_steps"] = optimizer.step_result.count_skipped()
    found.values["loss_scale"] = engine.loss_scale.state_dict()
    carried = optimizer.carried.state_dict()
    tensors: dict[str, Tensor] = {}
    found.own["carried"] = encode(carried, of_rank(engine.comm.rank, "carried"), tensors)
    found.parts += [whole(name, tensor) for name, tensor in tensors.items()]


def _single(optimizer: ZeroOptimizer) -> set[str]:
    """Names of states of one element, shape [1], that are no parts of a parameter's, as counts of steps may be."""
    # A slice of one element does not tell; what other slices have under the name does.
    return {
        key
        for part in optimizer.slices.all
        if part.parameter.numel() != 1
        for key, value in optimizer.inner.state.get(part.parameter, {}).items()
        if isinstance(value, Tensor) and value.numel() == 1
    }


def _is_first_replica(engine: Engine) -> bool:
    """Tell whether this rank, of several with the same states, is the one that saves their numbers."""
    chain = engine.mode.chain
    return chain.slice_index(engine.comm.rank, chain.world) % (chain.world // engine.mode.states) == 0


def _add_number(found: SavePlan, numbers: dict[str, dict[str, Any]], name: str, key: str, value: object) -> None:
    """A state that a parameter has once, such as its count of steps."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise CheckpointError(
            f"the optimizer's state {key!r} of {name!r} has shape {tuple(value.shape)}; expected one element for each "
            "of the parameter's, or one number"
        )
    tensors: dict[str, Tensor] = {}
    numbers.setdefault(name, {})[key] = encode(value, f"{STATE}{name}.{key}", tensors)
    found.parts += [whole(each, tensor) for each, tensor in tensors.items()]


def _groups(found: SavePlan, engine: Engine, optimizer: ZeroOptimizer) -> Iterator[dict[str, Any]]:
    names = {id(p): name for buffer in engine.buffers for name, p in zip(buffer.names, buffer.parameters, strict=True)}
    for index, (group, given) in enumerate(zip(optimizer.inner.param_groups, optimizer.slices.given, strict=True)):
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


def add_extra(found: SavePlan, rank: int, first: str) -> None:
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


def coded_entries(engine: Engine) -> dict[str, CodedEntry]:
    """Metadata of the parameters that exist in codes."""
    return {
        slot.name: CodedEntry(dtype=dtype_code(buffer.main_dtype, slot.name), shape=slot.shape, strides=slot.strides)
        for buffer in engine.buffers
        if isinstance(buffer, CodedBuffer)
        for slot in buffer.layout.slots
    }


def coded_parts(engine: Engine, which: Which) -> Iterator[TensorBox]:
    """Codes and scales of this rank's shards, or what it saves of them."""
    for buffer in engine.buffers:
        if not isinstance(buffer, CodedBuffer):
            continue
        codes, scales = buffer.blocks()
        for slot, each in fragments(buffer, buffer.placement.mode.states, which):
            # Parameters begin on a block, and pieces are whole blocks.
            here = each.offset // BLOCK
            there = each.start // BLOCK
            count = -(-(each.stop - each.start) // BLOCK)
            blocks = -(-slot.numel // BLOCK)
            box = Box((there, 0), (count, BLOCK))
            yield TensorBox(CODES + slot.name, (blocks, BLOCK), box, codes[here : here + count])
            yield TensorBox(SCALES + slot.name, (blocks,), Box((there,), (count,)), scales[here : here + count])


def require_ours(engine: Engine, optimizer: Optimizer | None) -> ZeroOptimizer | None:
    """The optimizer of an engine, as what it is.

    Raises:
        TypeError: it is none that zeropp has wrapped.
        ValueError: it is another model's.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, ZeroOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; expected the ZeroOptimizer around it, or None for weights only"
        )
    if optimizer.engine is not engine:
        raise ValueError("the optimizer and the model do not belong together; give the ZeroOptimizer of this model")
    return optimizer


def unfreeze(engine: Engine, optimizer: Optimizer | None) -> None:
    """Let parameters that are trained from now on have states, and averages, before these are loaded."""
    if isinstance(optimizer, ZeroOptimizer) and optimizer.engine is engine:
        optimizer.apply_requires_grad()
