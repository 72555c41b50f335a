"""Collect the contents of one rank's share of a checkpoint, and match a model's names with those of a checkpoint.

A share has the boxes that the rank writes, values that are the same on all ranks, and values of this rank only. Tensors
keep the model's names, with a prefix. Averages of weights (``zeropp.ema``) in ``extra`` are saved in shards like
weights. Each rank saves the states of its random number generators: torch's on the CPU and on the model's device,
Python's, and numpy's if numpy has been imported.
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
    "fill_in",
    "has_extra_state",
    "match",
    "match_groups",
    "model_names",
    "of_rank",
    "prefix_of",
    "random_state",
    "require_ours",
    "reseed",
    "restore_random_state",
    "unfreeze",
]


def model_names(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a model's state dict by name, without duplicates of tied ones.

    Returns:
        (parameters and persistent buffers by their first name, first name of each tied tensor by its other names).
    """
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
    """Return True if a module overrides ``get_extra_state``; the same test as in ``nn.Module.state_dict``."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def match(named: Mapping[str, Tensor], aliases: Mapping[str, str], metadata: Metadata) -> dict[str, str]:
    """Find the name in a checkpoint of each of the model's tensors.

    All names of a tied tensor are tried, because the model and the checkpoint may tie different tensors.

    Args:
        named: tensors of the model by first name, from :func:`model_names`.
        aliases: first names of tied tensors by their other names, from :func:`model_names`.
        metadata: metadata of the checkpoint.

    Returns:
        Name in the checkpoint by name in the model, for the tensors that the checkpoint has.
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
    """Compare the tensors of a model with those of a checkpoint.

    Args:
        named: tensors of the model by first name, from :func:`model_names`.
        aliases: first names of tied tensors by their other names, from :func:`model_names`.
        matched: names in the checkpoint by names in the model, from :func:`match`.
        metadata: metadata of the checkpoint.
        strict: raise if there are missing or unexpected tensors.

    Returns:
        (missing: names of the model's tensors that the checkpoint does not have; unexpected: names of the checkpoint's
        tensors that the model does not have, or has tied to another one).

    Raises:
        CheckpointError: ``strict`` is True and tensors are missing or unexpected, or a tensor has another shape.
    """
    saved = {name.removeprefix(MODEL) for name in metadata.tensors if name.startswith(MODEL)} | metadata.coded.keys()
    missing = [name for name in named if name not in matched]
    # zeropp saves a tied tensor once. If its checkpoint (world > 0) has a tensor under another name of a tied tensor,
    # the two were not tied when they were saved. Other programs may save a tied tensor under each of its names.
    apart = sorted(saved.intersection(aliases).difference(matched.values())) if metadata.world else []
    unexpected = sorted(saved.difference(named, aliases, matched.values()))
    # Parameters that the save left out as frozen may be missing if they are frozen here, too: the user loads them from
    # elsewhere. A parameter that is trained here counts as missing, because its values at the save are not known.
    said = metadata.values.get("left_out", [])
    left_out = {name for name in said if name in named and not named[name].requires_grad}
    wanted = [name for name in missing if name not in left_out]
    if strict and (wanted or unexpected or apart):
        why = ", which were frozen and left out when it was saved" if set(wanted) & set(said) else ""
        lacks = [f"the checkpoint has no {_list(wanted)}{why}"] if wanted else []
        lacks += [f"the model has no {_list(unexpected)}"] if unexpected else []
        if apart:
            first = aliases[apart[0]]
            tied = f"the model ties {_list(apart)} to {first!r}, but the checkpoint has separate values"
            lacks.append(f"{tied}, of which strict=False takes {matched.get(first, first)!r}")
        kept = ". strict=False leaves missing and surplus values as they are" if wanted or unexpected else ""
        raise CheckpointError(f"model and checkpoint differ: {', and '.join(lacks)}{kept}")
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
    """Find the checkpoint's settings for each parameter group of an optimizer.

    Args:
        optimizer: the optimizer with the groups.
        named: tensors of the model by first name, from :func:`model_names`.
        matched: names in the checkpoint by names in the model, from :func:`match`.
        source: reader of the checkpoint; reads settings that are tensors if they must be compared.

    Returns:
        (settings of each group, as JSON of :func:`encode`; names of trained parameters without states in the
        checkpoint).

    Raises:
        CheckpointError: parameters of one group had different settings when they were saved.
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
        # A parameter that the checkpoint left out is not in ``matched``, but is listed in a group under its own name.
        there = {name: saved[matched.get(name, name)] for name in own if matched.get(name, name) in saved}
        # If the checkpoint has no states at all, the optimizer keeps none (plain SGD), and no parameter lacks them.
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
    """Return the first five names and the number of further ones, for messages."""
    return f"{', '.join(map(repr, names[:5]))}{f' and {len(names) - 5} more' if names[5:] else ''}"


def prefix_of(name: str) -> str:
    """Return the prefix of the tensors of an average with the given name in ``extra``.

    The name is quoted, so that the prefix of one average is never the beginning of another's.
    """
    return f"zeropp.average.{name!r}."


def average_parts(average: Average, name: str, which: Which) -> Iterator[TensorBox]:
    """Yield the boxes of this rank's shards of an average of weights.

    Args:
        average: the average.
        name: name of the average in ``extra``.
        which: the part of this rank's slice to return; see :data:`Which`.
    """
    for buffer, piece in average.take_pieces().items():
        yield from parts_of_row(buffer, piece, buffer.placement.mode.states, prefix_of(name), which)


def averages_of(engine: Engine, extra: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Average]:
    """Return the averages of weights among the ``extra`` objects that the checkpoint has, by name.

    Args:
        engine: engine that the averages must belong to.
        extra: objects to restore, by name.
        saved: encoded ``extra`` values of the checkpoint, by name.

    Raises:
        CheckpointError: the checkpoint has another kind of object under an average's name.
        ValueError: an average belongs to another model.
    """
    found = {name: each for name, each in extra.items() if isinstance(each, Average) and name in saved}
    for name, average in found.items():
        average.check_engine(engine)
        if not isinstance(saved[name], dict) or saved[name].keys() != average.counts().keys():
            raise CheckpointError(f"extra[{name!r}] is an average of the weights here, and was none when it was saved")
    return found


@torch.no_grad()
def fill_in(average: Average, name: str, renamed: Mapping[str, str], metadata: Metadata) -> None:
    """Set an average to the present weights for parameters whose average the checkpoint does not have.

    A parameter that was frozen when the checkpoint was saved has no average in it.

    Args:
        average: the average, after its saved parts have been read.
        name: name of the average in ``extra``.
        renamed: names in the checkpoint by names in the model, from :func:`match`.
        metadata: metadata of the checkpoint.
    """
    for buffer, piece in average.take_pieces().items():
        for slot, each in fragments(buffer, buffer.placement.mode.states, "slice"):
            if prefix_of(name) + renamed.get(slot.name, "") not in metadata.tensors:
                place = slice(each.offset, each.offset + each.stop - each.start)
                piece[place].copy_(buffer.shard[place])


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this rank's random number generators, and torch's initial seed, in a form to encode."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    # If numpy has not been imported, its generator has not been used.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # legacy=False returns a dict for every kind of bit generator.
        state["numpy"] = numpy.random.get_state(legacy=False)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states of the random number generators that :func:`random_state` returned on the same rank."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        _restore_numpy(state["numpy"], state["seed"])


def _restore_numpy(state: dict[str, Any], seed: int) -> None:
    """Restore numpy's global generator; seed it if another kind of bit generator is in use here."""
    import numpy

    here, there = numpy.random.get_state(legacy=False)["bit_generator"], state["bit_generator"]
    if here == there:
        numpy.random.set_state(state)
        return
    warn_user(f"numpy's generator was a {there} when it was saved, and is a {here} here; it is seeded anew")
    numpy.random.seed(seed % 2**32)


def reseed(state: dict[str, Any], rank: int, world: int) -> None:
    """Seed the random number generators from a saved state, for a run with another number of ranks.

    ``seed = (saved seed * 1000003 + rank * 8191 + world) mod 2**63``, so ranks get different, reproducible seeds.

    Args:
        state: saved state of a rank.
        rank: this rank.
        world: number of ranks.
    """
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
        parts: boxes that this rank writes.
        shapes: (dtype, shape) of every tensor of the model, by name in the checkpoint; includes empty tensors, which
            have no boxes.
        aliases: first name of each tied tensor, by its other names.
        coded: metadata of the parameters that are stored as codes, by name.
        values: values that are the same on every rank, by name.
        own: values of this rank only, by name.
        states: values and state dicts of the user's ``extra`` objects, by name, not encoded yet.
        digest: digest of ``states``, to compare ranks.
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
    """Return the name in the checkpoint of a tensor that belongs to one rank only."""
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
    """Collect this rank's share of a checkpoint. The boxes are views; nothing is copied.

    The function does not communicate, but ``get_extra_state`` and ``state_dict`` of the user's objects may.

    Args:
        engine: engine of the model.
        model: the wrapped model.
        optimizer: the model's optimizer, or None to save weights only.
        extra: the user's values and objects, by name.
        checks: checksum algorithm for the digest of ``extra``.
        trained_only: leave out frozen parameters.

    Raises:
        CheckpointError: a checkpoint cannot store one of the values.
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
            value.check_engine(engine)
            found.parts += average_parts(value, name, "own")
    found.digest = _digest(found.states, checks)
    for part in found.parts:
        # Raises for a dtype that safetensors cannot store, before anything is copied or written.
        dtype_code(part.values.dtype, part.name)
    return found


def _add_model(found: SavePlan, engine: Engine, model: nn.Module) -> None:
    """Add parameters, buffers, cached weights and extra states of modules to a rank's share."""
    named, found.aliases = model_names(model)
    first = engine.comm.rank == 0
    mains = {n: b.main_dtype for b in engine.buffers for n in b.names}
    found.coded = coded_entries(engine)
    for name, tensor in named.items():
        if name in found.coded:
            continue
        found.shapes[MODEL + name] = mains.get(name, tensor.dtype), tuple(tensor.shape)
        # Buffers and parameters that are not floating point exist whole on every rank, so rank 0 saves them.
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
    """Remove frozen parameters from a rank's share and store their names, so that a load can accept their absence."""
    named, _ = model_names(model)
    left = {name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and not tensor.requires_grad}
    gone = {prefix + name for name in left for prefix in (MODEL, BASES, CODES, SCALES)}
    found.parts = [part for part in found.parts if part.name not in gone]
    found.shapes = {name: shape for name, shape in found.shapes.items() if name not in gone}
    found.aliases = {alias: name for alias, name in found.aliases.items() if name not in left}
    found.coded = {name: entry for name, entry in found.coded.items() if name not in left}
    found.values["left_out"] = sorted(left)


def _add_optimizer(found: SavePlan, engine: Engine, optimizer: ZeroOptimizer) -> None:
    """Add optimizer states, settings of groups, and the carried quantization errors to a rank's share."""
    slices = optimizer.slices
    rows: list[tuple[Slice, str, Tensor]] = []
    numbers: dict[str, dict[str, Any]] = {}
    single = _single(optimizer)
    for part in slices.all:
        for key, value in optimizer.inner.state.get(part.parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == part.parameter.shape and key not in single:
                rows.append((part, key, value))
            # A single number, such as the count of steps, is equal on all ranks that have a slice of the parameter. The
            # rank with the parameter's first element saves it.
            elif part.start == 0 and _is_first_replica(engine):
                _add_number(found, numbers, part.name, key, value)
    found.parts += state_parts(engine, rows, "own")
    found.own["numbers"] = numbers
    # States of frozen parameters are not sharded: every rank has them whole, so rank 0 saves them.
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
    carried = optimizer.error_feedback.state_dict()
    tensors: dict[str, Tensor] = {}
    found.own["carried"] = encode(carried, of_rank(engine.comm.rank, "carried"), tensors)
    found.parts += [whole(name, tensor) for name, tensor in tensors.items()]


def _single(optimizer: ZeroOptimizer) -> set[str]:
    """Return the keys of optimizer states that are single numbers with shape [1], such as some counts of steps."""
    # For a slice of one element, a number and an elementwise state have the same shape. Larger slices show which it is.
    return {
        key
        for part in optimizer.slices.all
        if part.parameter.numel() != 1
        for key, value in optimizer.inner.state.get(part.parameter, {}).items()
        if isinstance(value, Tensor) and value.numel() == 1
    }


def _is_first_replica(engine: Engine) -> bool:
    """Return True if this rank saves the single-number states, out of the ranks that have the same slices."""
    chain = engine.mode.chain
    return chain.slice_index(engine.comm.rank, chain.world) % (chain.world // engine.mode.states) == 0


def _add_number(found: SavePlan, numbers: dict[str, dict[str, Any]], name: str, key: str, value: object) -> None:
    """Add a state that is a single number per parameter, such as its count of steps.

    Args:
        found: the share to add to.
        numbers: encoded states by parameter name and key; the number is added here.
        name: name of the parameter.
        key: key of the state.
        value: the number, a plain value or a tensor of one element.

    Raises:
        CheckpointError: ``value`` is a tensor with more than one element.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise CheckpointError(
            f"the optimizer's state {key!r} of {name!r} has shape {tuple(value.shape)}; expected one element for each "
            "of the parameter's, or one number"
        )
    tensors: dict[str, Tensor] = {}
    numbers.setdefault(name, {})[key] = encode(value, f"{STATE}{name}.{key}", tensors)
    found.parts += [whole(each, tensor) for each, tensor in tensors.items()]


def _groups(found: SavePlan, engine: Engine, optimizer: ZeroOptimizer) -> Iterator[dict[str, Any]]:
    """Yield the parameter names and encoded settings of each parameter group; rank 0 saves tensors among settings."""
    names = {id(p): name for buffer in engine.buffers for name, p in zip(buffer.names, buffer.parameters, strict=True)}
    for index, (group, given) in enumerate(zip(optimizer.inner.param_groups, optimizer.slices.given, strict=True)):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        tensors: dict[str, Tensor] = {}
        encoded = encode(settings, f"optimizer.group.{index}", tensors)
        if engine.comm.rank == 0:
            found.parts += [whole(name, tensor) for name, tensor in tensors.items()]
        yield {"parameters": [names[id(p)] for p in given if id(p) in names], "settings": encoded}


def _digest(states: Mapping[str, Any], checks: Checksums) -> str:
    """Return a digest of the ``extra`` states; it is equal on ranks with equal states."""
    tensors: dict[str, Tensor] = {}
    summed = [json.dumps(encode(states, "extra", tensors)).encode()]
    for name, tensor in tensors.items():
        row = as_bytes(tensor.cpu().contiguous())
        summed.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {checks.of_bytes(view_of(row))}".encode())
    return checks.hexdigest(b"\n".join(summed))


def add_extra(found: SavePlan, rank: int, first: str) -> None:
    """Add the user's ``extra`` states to a rank's share, on rank 0 and on ranks whose states differ from rank 0's.

    Args:
        found: this rank's share.
        rank: this rank.
        first: rank 0's digest of its ``extra`` states.
    """
    tensors: dict[str, Tensor] = {}
    if rank == 0:
        found.values["extra"] = encode(found.states, "extra", tensors)
    elif found.digest != first:
        found.own["extra"] = encode(found.states, of_rank(rank, "extra"), tensors)
    found.parts += [whole(name, tensor) for name, tensor in tensors.items()]


def _state_of(name: str, value: Any) -> Any:
    """Return the value to save for one ``extra`` object: its ``state_dict()`` if it has one, else the object itself."""
    if isinstance(value, Average):
        # Save only the numbers here. average_parts() saves the shards of the average as boxes.
        return value.counts()
    if callable(getattr(value, "state_dict", None)):
        if not callable(getattr(value, "load_state_dict", None)):
            raise CheckpointError(
                f"extra[{name!r}], a {type(value).__qualname__}, has state_dict but no load_state_dict"
            )
        return value.state_dict()
    return value


def coded_entries(engine: Engine) -> dict[str, CodedEntry]:
    """Return the metadata of the parameters that are stored as codes, by name."""
    return {
        slot.name: CodedEntry(dtype=dtype_code(buffer.main_dtype, slot.name), shape=slot.shape, strides=slot.strides)
        for buffer in engine.buffers
        if isinstance(buffer, CodedBuffer)
        for slot in buffer.layout.slots
    }


def coded_parts(engine: Engine, which: Which) -> Iterator[TensorBox]:
    """Yield the boxes of the codes and scales of this rank's shards.

    Args:
        engine: engine of the model.
        which: the part of this rank's slice to return; see :data:`Which`.
    """
    for buffer in engine.buffers:
        if not isinstance(buffer, CodedBuffer):
            continue
        codes, scales = buffer.blocks()
        for slot, each in fragments(buffer, buffer.placement.mode.states, which):
            # Parameters begin on a block, and ranks own whole blocks, so the divisions by BLOCK have no remainder.
            here = each.offset // BLOCK
            there = each.start // BLOCK
            count = -(-(each.stop - each.start) // BLOCK)
            blocks = -(-slot.numel // BLOCK)
            box = Box((there, 0), (count, BLOCK))
            yield TensorBox(CODES + slot.name, (blocks, BLOCK), box, codes[here : here + count])
            yield TensorBox(SCALES + slot.name, (blocks,), Box((there,), (count,)), scales[here : here + count])


def require_ours(engine: Engine, optimizer: Optimizer | None) -> ZeroOptimizer | None:
    """Check that an optimizer is the ZeroOptimizer of an engine's model, and return it with that type.

    Args:
        engine: engine of the model.
        optimizer: the optimizer given by the user, or None, which is returned unchanged.

    Raises:
        TypeError: the optimizer is not a ZeroOptimizer.
        ValueError: the optimizer belongs to another model.
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
    """Apply changed ``requires_grad`` flags before a load, so that parameters unfrozen since then can receive states.

    Collective if flags have changed.
    """
    if isinstance(optimizer, ZeroOptimizer) and optimizer.engine is engine:
        optimizer.apply_requires_grad()
