"""``load``: restore a checkpoint in place, saved on any number of ranks and with any partition.

A :class:`Restore` is one load on one rank. Its constructor checks that the checkpoint fits and changes nothing.
``read_values`` then reads tensors into shards, and ``finish_restore`` loads everything else. Files of other programs
may store a tied parameter under each of its names; with ``strict`` these values must be equal.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp.checkpoint.boxes import (
    BASES,
    MODEL,
    STATE,
    CheckpointError,
    TensorBox,
    base_parts,
    main_parts,
    state_parts,
    whole,
)
from zeropp.checkpoint.foreign import foreign_source
from zeropp.checkpoint.metadata import DTYPES, Metadata, decode, tensors_in
from zeropp.checkpoint.rank_sync import Progress, common_path, reraise_as, run_between_passes
from zeropp.checkpoint.save_plan import (
    average_parts,
    averages_of,
    coded_parts,
    compare,
    fill_in,
    has_extra_state,
    match,
    match_groups,
    model_names,
    prefix_of,
    require_ours,
    reseed,
    restore_random_state,
    unfreeze,
)
from zeropp.checkpoint.saving import backgrounds, wait_together
from zeropp.checkpoint.tensor_reader import CODES, SCALES, Encoded, TensorReader, Verify
from zeropp.config.base import notify_once, warn_user
from zeropp.engine.engine import Engine, engine_of
from zeropp.optimizer.optimizer_step import load_error_feedback, load_optimizer
from zeropp.optimizer.sharded_params import Slice
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["IN_PART", "KINDS", "Loaded", "Restore", "load", "load_foreign", "load_safetensors", "require_equal"]


def require_equal(engine: Engine, aliases: Mapping[str, str], renamed: Mapping[str, str], source: TensorReader) -> None:
    """Check that tensors which the model ties have equal values in the files. Each rank compares its own shards.

    Args:
        engine: engine of the model.
        aliases: first name of each tied tensor, by its other names.
        renamed: name in the files of each tensor of the model, by its first name.
        source: reader of the files.

    Raises:
        CheckpointError: tied tensors differ in shape, or in value by more than the rounding to a stored dtype. Loading
            would keep only one of them.
    """
    apart = {
        alias: first
        for alias, first in aliases.items()
        if MODEL + alias in source.metadata.tensors and renamed.get(first, alias) != alias
    }
    if not apart:
        return
    tensors = source.metadata.tensors
    for alias, first in apart.items():
        here, there = (tensors[MODEL + name].shape for name in (renamed[first], alias))
        if here != there:
            raise CheckpointError(
                f"{alias!r} is tied to {first!r} here, but in the files it has shape {there}, and {renamed[first]!r} "
                f"has shape {here}; strict=False takes {renamed[first]!r} for both"
            )
    firsts = set(apart.values())
    before = source.nbytes_read
    parts: dict[str, list[TensorBox]] = {}
    for part in main_parts(engine, "slice"):
        name = part.name.removeprefix(MODEL)
        if name in firsts:
            parts.setdefault(name, []).append(part)
    for alias, first in apart.items():
        for part in parts.get(first, ()):
            own, other = (torch.empty_like(part.values) for _ in range(2))
            pairs = (renamed[first], own), (alias, other)
            source.read_boxes([TensorBox(MODEL + name, part.shape, part.box, values) for name, values in pairs])
            # One of the two may have been rounded when it was saved, so round both to both stored dtypes.
            for name in (renamed[first], alias):
                own, other = (each.to(DTYPES[tensors[MODEL + name].dtype]).to(each.dtype) for each in (own, other))
            if not torch.allclose(own, other, rtol=0, atol=0, equal_nan=True):
                raise CheckpointError(
                    f"the model ties {alias!r} to {first!r}, but the checkpoint has other values for {alias!r}, which "
                    f"would be lost; strict=False takes those of {renamed[first]!r}"
                )
    # Count the bytes read for this comparison apart from those that the model needs.
    source.nbytes_converted += source.nbytes_read - before
    source.nbytes_read = before


IN_PART = "weights and states are changed in part: load again, or another checkpoint"
"""Text for errors that occur after the load has begun to change values."""


@dataclass
class Loaded:
    """The result of a load.

    Attributes:
        extra: saved ``extra`` values that no given object with ``load_state_dict`` received, by name.
        missing: names of parameters, buffers and module extra states that the checkpoint does not have; they keep their
            values.
        unexpected: names of parameters, buffers and module extra states in the checkpoint that the model does not have.
        fresh: names of trained parameters without optimizer states in the checkpoint.
        nbytes_read: bytes that this rank has read, without ``nbytes_converted``.
        nbytes_converted: bytes that this rank has read as inputs of transformers' conversions, or to compare tensors
            that the model ties.
    """

    extra: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    nbytes_read: int = 0
    nbytes_converted: int = 0


class Restore:
    """One load on one rank. The constructor checks that the checkpoint fits, before anything changes.

    Args:
        engine: engine of the model.
        model: the wrapped model.
        optimizer: the model's optimizer, or None to load weights only.
        extra: objects to restore, by name.
        source: reader of the checkpoint.
        strict: raise if the model and the checkpoint have different tensors or states.
        kinds: the parts to load, out of :data:`KINDS`.

    Raises:
        CheckpointError: the checkpoint does not fit.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        optimizer: ZeroOptimizer | None,
        extra: Mapping[str, Any],
        source: TensorReader,
        strict: bool,
        kinds: frozenset[str],
    ) -> None:
        self.engine = engine
        self.model = model
        self.extra = extra
        self.optimizer = optimizer
        self.kinds = kinds
        self.source = source
        self.metadata = source.metadata
        self.result = Loaded()
        self.named, aliases = model_names(model)
        # Name in the checkpoint by name in the model.
        self._renamed = match(self.named, aliases, self.metadata)
        self.states: dict[nn.Parameter, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []
        # Decoded values of _encoded(), set by read_values().
        self.values: dict[str, Any] = {}
        if "model" in self.kinds:
            self.result.missing, self.result.unexpected = compare(
                self.named, aliases, self._renamed, self.metadata, strict
            )
            # Files of other programs (world = 0) may have different values under names that the model ties.
            if strict and not self.metadata.world:
                require_equal(engine, aliases, self._renamed, source)
        if self._loads_optimizer:
            assert self.optimizer is not None
            self.groups, self.result.fresh = match_groups(self.optimizer, self.named, self._renamed, source)
            self._compare_optimizers(strict)
        elif self.optimizer is not None and "optimizer" in self.kinds:
            self._note_no_states(strict)
        if "model" in self.kinds:
            self._compare_modules(strict)
        if strict and "extra" in self.kinds:
            unknown = sorted(extra.keys() - self._saved_extra().keys())
            if unknown:
                raise CheckpointError(
                    f"extra has {unknown}, and the checkpoint has {sorted(self._saved_extra())}; leave them out, or "
                    "load with strict=False"
                )
        # The JSON of the requested values, and memory for the tensors in it. Missing tensors raise here, before
        # anything changes.
        self._json = self._encoded()
        self._held = {name: source.room(name) for name in dict.fromkeys(tensors_in(self._json))}
        self._averages = averages_of(engine, extra, self._json.get("extra", {}))

    @property
    def _loads_optimizer(self) -> bool:
        return self.optimizer is not None and "optimizer" in self.kinds and "groups" in self.metadata.values

    def _compare_optimizers(self, strict: bool) -> None:
        """Compare the class and settings of the optimizer with those in the checkpoint.

        Another class of optimizer raises with ``strict`` and warns otherwise. A boolean setting that differs warns, and
        so do states of parameters that are frozen here, which are not loaded.
        """
        assert self.optimizer is not None
        first = self.engine.comm.rank == 0
        here = type(self.optimizer.inner).__qualname__
        there = self.metadata.values.get("optimizer")
        if there is not None and here != there:
            told = f"the checkpoint has states of {there}, and the optimizer is {here}"
            if strict:
                raise CheckpointError(
                    f'{told}, which may need other states; give {there}, load with only=["model"], or with '
                    "strict=False to load them nevertheless"
                )
            if first:
                warn_user(told)
        for number, (group, saved) in enumerate(zip(self.optimizer.inner.param_groups, self.groups, strict=True)):
            for key, value in saved.items():
                switches = isinstance(value, bool) and isinstance(group.get(key), bool)
                if first and switches and group[key] != value:
                    warn_user(
                        f"{key!r} of group {number} is {group[key]} here; the checkpoint's {value} takes its place"
                    )

        keys = self._keys()
        frozen = [n for b in self.engine.buffers if not b.trainable for n in b.names if self._renamed.get(n) in keys]
        if frozen:
            more = f" and {len(frozen) - 5} more" if len(frozen) > 5 else ""
            notify_once(
                f"the checkpoint has optimizer states of {frozen[:5]}{more}, which are frozen here: they are not "
                "loaded, and begin anew where a parameter is unfrozen. To keep them, unfreeze the parameters before "
                "loading, and freeze them afterwards",
                first=first,
            )

    def _note_no_states(self, strict: bool) -> None:
        """Handle a checkpoint without optimizer states: raise with ``strict``, else report all parameters as fresh."""
        assert self.optimizer is not None
        if strict:
            raise CheckpointError(
                "the checkpoint was saved without an optimizer; leave it out here, or load with strict=False, which "
                "leaves its states as they are"
            )
        self.result.fresh = [part.name for part in self.optimizer.slices.all]

    def _compare_modules(self, strict: bool) -> None:
        """Compare the modules with extra states (``get_extra_state``) in the model and in the checkpoint."""
        there = {_extra_key(path) for path in self.metadata.values.get("modules", {})}
        # Extra states are not read from files of other programs (world = 0), so none count as missing there.
        modules = self.model.named_modules()
        here = {_extra_key(path) for path, each in modules if has_extra_state(each)} if self.metadata.world else there
        self.result.missing += sorted(here - there)
        self.result.unexpected += sorted(there - here)
        if strict and here != there:
            raise CheckpointError(
                f"modules' extra states differ: the model has no {sorted(there - here)[:5]}, the checkpoint no "
                f"{sorted(here - there)[:5]}. strict=False leaves them as they are"
            )

    def _own(self) -> dict[str, Any]:
        """Return the values that this rank saved; empty if the checkpoint was saved by another number of ranks."""
        same = self.metadata.world == self.engine.comm.world
        return self.metadata.ranks[self.engine.comm.rank] if same else {}

    def _there(self, parts: Iterator[TensorBox], prefix: str) -> Iterator[TensorBox]:
        """Yield the boxes of tensors that the checkpoint has, renamed to the checkpoint's names.

        Args:
            parts: boxes with the model's names.
            prefix: prefix of the names, such as :data:`MODEL`.
        """
        for part in parts:
            name = self._renamed.get(part.name.removeprefix(prefix))
            coded = prefix == MODEL and name in self.metadata.coded
            if name is not None and (coded or prefix + name in self.metadata.tensors):
                yield TensorBox(prefix + name, part.shape, part.box, part.values)

    def look_up(self) -> None:
        """Look up the places of this rank's weights in the files without reading them."""
        self.source.find(self._there(main_parts(self.engine, "slice"), MODEL))

    # From here on, methods change values.

    @torch.no_grad()
    def read_values(self) -> None:
        """Read this rank's weights, optimizer states and averages into their memory, and decode the other values."""
        engine = self.engine
        # Pass all boxes to one read_boxes() call, so that each stretch of a file is read only once.
        parts: list[Iterable[TensorBox]] = [self._held.values()]
        if "model" in self.kinds:
            spread = {name for buffer in engine.buffers for name in buffer.names}
            rest = (whole(MODEL + name, tensor.data) for name, tensor in self.named.items() if name not in spread)
            parts += [
                self._there(main_parts(engine, "slice"), MODEL),
                self._there(rest, MODEL),
                self._there(base_parts(engine, "slice"), BASES),
            ]
        if self._loads_optimizer:
            parts.append(self._state_parts())
        parts += [self._there(average_parts(a, name, "slice"), prefix_of(name)) for name, a in self._averages.items()]
        self.source.read_boxes(itertools.chain(*parts))
        if "model" in self.kinds and not self.engine.options.loads_from_float32:
            self._round_main()
        self.values = decode(self._json, lambda name: self._held[name].values)
        if "model" in self.kinds:
            self._read_codes()
        for name, average in self._averages.items():
            fill_in(average, name, self._renamed, self.metadata)
        self.source.verify_rest(engine.comm.rank, engine.comm.world)

    def _round_main(self) -> None:
        """Round the loaded main weights to the dtypes of the forward pass (``load_from_fp32_weights`` is false)."""
        dtypes = {name: buffer.compute_dtype for buffer in self.engine.buffers for name in buffer.names}
        for part in main_parts(self.engine, "slice"):
            name = part.name.removeprefix(MODEL)
            if name in self._renamed:
                part.values.copy_(part.values.to(dtypes[name]))

    def _encoded(self) -> dict[str, Any]:
        """Return the requested values other than sharded tensors, as JSON of :func:`encode`."""
        own = self._own()
        found: dict[str, Any] = {}
        if "model" in self.kinds:
            found["modules"] = self.metadata.values.get("modules", {})
        if self._loads_optimizer:
            assert self.optimizer is not None
            here = {part.name for part in self.optimizer.slices.all}
            numbers = {name: state for rank in self.metadata.ranks for name, state in rank.get("numbers", {}).items()}
            found["numbers"] = {
                name: numbers[there] for name, there in self._renamed.items() if name in here and there in numbers
            }
            found["groups"] = self.groups
            # Carried quantization errors belong to this rank's slices, so they fit only the same layout.
            found["carried"] = own.get("carried") if own.get("layout") == self.engine.layout_id() else None
        if "random" in self.kinds:
            found["random"] = (own or self.metadata.ranks[0])["random"]
        if "extra" in self.kinds:
            found["extra"] = self._saved_extra()
        return found

    def _read_codes(self) -> None:
        """Read the parameters that this model stores as codes: copy saved codes, or encode saved values."""
        encoded = Encoded(self.engine, self._renamed, self.metadata)
        values = {part.name.removeprefix(MODEL) for part in encoded.parts}
        for prefix in (CODES, SCALES):
            parts = (part for part in coded_parts(self.engine, "slice") if part.name.startswith(prefix))
            fitting = (part for part in parts if part.name.removeprefix(prefix) not in values)
            self.source.read_boxes(self._there(fitting, prefix))
        self.source.read_boxes(self._there(iter(encoded.parts), MODEL))
        encoded.encode()

    def _state_parts(self) -> Iterator[TensorBox]:
        """Allocate this rank's elementwise optimizer states and yield their boxes, with the checkpoint's names."""
        optimizer = self.optimizer
        assert optimizer is not None
        keys = self._keys()
        rows: list[tuple[Slice, str, Tensor]] = []
        for part in optimizer.slices.all:
            for key, dtype in keys.get(self._renamed.get(part.name, ""), {}).items():
                tensor = torch.empty(part.parameter.shape, dtype=dtype, device=part.parameter.device)
                rows.append((part, key, tensor))
                self.states.setdefault(part.parameter, {})[key] = tensor
        for piece in state_parts(self.engine, rows, "slice"):
            name, _, key = piece.name.removeprefix(STATE).rpartition(".")
            yield TensorBox(f"{STATE}{self._renamed[name]}.{key}", piece.shape, piece.box, piece.values)

    def _keys(self) -> dict[str, dict[str, torch.dtype]]:
        """Return the dtypes of the elementwise optimizer states in the checkpoint, by parameter name and key."""
        ranks = self.metadata.ranks
        numbers = {(name, key) for rank in ranks for name, found in rank.get("numbers", {}).items() for key in found}
        keys: dict[str, dict[str, torch.dtype]] = {}
        for full, entry in self.metadata.tensors.items():
            if full.startswith(STATE):
                name, _, key = full.removeprefix(STATE).rpartition(".")
                if (name, key) not in numbers:
                    keys.setdefault(name, {})[key] = DTYPES[entry.dtype]
        return keys

    # Called on all ranks after all have read.

    def finish_restore(self, doing: str) -> None:
        """Load module extra states, optimizer, ``extra`` objects and random states, and mark the weights as changed.

        Collective. An error in the user's code on one rank is raised on every rank.

        Args:
            doing: description of the load, for errors.
        """
        if "model" in self.kinds:
            # Before _weights_changed(), because set_extra_state() may change weights.
            run_between_passes(self.engine, doing, self._load_modules, IN_PART)
            self._weights_changed()
        if self.optimizer is not None:
            self.optimizer.zero_grad(now=True)
        if self._loads_optimizer:
            assert self.optimizer is not None
            run_between_passes(self.engine, doing, self._load_optimizer, IN_PART)
            load_error_feedback(self.engine, self.optimizer.error_feedback, self.values["carried"])
        run_between_passes(self.engine, doing, self._load_others, IN_PART)
        self.result.nbytes_read = self.source.nbytes_read
        self.result.nbytes_converted = self.source.nbytes_converted

    def _weights_changed(self) -> None:
        """Mark main weights as changed and start the refresh of cached weights that were not restored."""
        engine = self.engine
        engine.weights_changed(engine.buffers, delay_refresh=True)
        for buffer in engine.trainable_buffers:
            names = [BASES + self._renamed.get(name, "") for name in buffer.names]
            if buffer.base is not None and not buffer.counts_escapes and all(n in self.metadata.tensors for n in names):
                # The cached weights that differences are taken to were restored with the main weights. A refresh would
                # change them, and the run would not continue bit for bit.
                buffer.cache_restored()
        engine.start_delayed_refresh()

    def _load_modules(self) -> None:
        modules = dict(self.model.named_modules())
        for path, state in self.values["modules"].items():
            if path in modules and has_extra_state(modules[path]):
                with reraise_as(f"set_extra_state of the module {path!r}", modules[path]):
                    modules[path].set_extra_state(state)

    def _load_optimizer(self) -> None:
        assert self.optimizer is not None
        with self.optimizer.slices.without_markers():
            self._load_slices(self.optimizer)

    def _load_slices(self, optimizer: ZeroOptimizer) -> None:
        """Load states and settings into the inner optimizer, by its own ``load_state_dict``."""
        for part in optimizer.slices.all:
            if part.name in self.values["numbers"]:
                self.states.setdefault(part.parameter, {}).update(self.values["numbers"][part.name])
        inner = optimizer.inner
        state = {}
        groups = []
        index = 0
        read: dict[nn.Parameter, dict[str, Any]] = {}
        names = {part.parameter: part.name for part in optimizer.slices.all}
        for group, settings in zip(inner.param_groups, self.values["groups"], strict=True):
            # torch replaces the whole group, so keep the settings that the checkpoint does not have.
            kept = {key: value for key, value in group.items() if key != "params"}
            numbers = []
            for parameter in group["params"]:
                found = self.states.get(parameter)
                if found:
                    # Clone counts of steps: each slice of a parameter increments its own count in place.
                    read[parameter] = state[index] = {
                        k: v.clone() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in found.items()
                    }
                numbers.append(index)
                index += 1
            groups.append({**kept, **settings, "params": numbers})
        with reraise_as("load_state_dict of the optimizer", inner):
            load_optimizer(inner, {"state": state, "param_groups": groups})
        for parameter, found in read.items():
            self._keep_kinds(inner.state.get(parameter, {}), found, names[parameter], parameter.dtype)
        optimizer.step_result.load(self.metadata.values["skipped_steps"], self.metadata.values.get("loss_scale"))

    def _keep_kinds(self, state: dict[str, Any], read: dict[str, Any], name: str, dtype: torch.dtype) -> None:
        """Undo the conversions that torch's ``load_state_dict`` applies to states, where the saved dtype must stay.

        Args:
            state: state of one parameter after torch has loaded it; changed in place.
            read: the same state as read from the checkpoint.
            name: name of the parameter.
            dtype: dtype of the parameter, to which torch converts states.
        """
        entry = self.metadata.tensors.get(MODEL + self._renamed.get(name, ""))
        usual = dtype if entry is None else DTYPES[entry.dtype]
        for key, value in read.items():
            # torch has its own rules for "step" and keeps its dtype, or gives it the one that the optimizer needs.
            if key != "step" and key in state:
                state[key] = _as_read(state[key], value, dtype, usual)

    def _load_others(self) -> None:
        if "random" in self.kinds:
            self._load_random()
        if "extra" in self.kinds:
            self._load_extra()

    def _load_random(self) -> None:
        comm, state = self.engine.comm, self.values["random"]
        if self._own():
            restore_random_state(state, self.engine.device)
            return
        if comm.rank == 0:
            warn_user(
                f"the checkpoint was saved by {self.metadata.world} ranks and is loaded by {comm.world}: random "
                "numbers begin anew, from seeds made of the saved one"
            )
        reseed(state, comm.rank, comm.world)

    def _saved_extra(self) -> dict[str, Any]:
        return {**self.metadata.values.get("extra", {}), **self._own().get("extra", {})}

    def _load_extra(self) -> None:
        ranks = self.metadata.ranks
        if not self._own() and any("extra" in rank for rank in ranks) and self.engine.comm.rank == 0:
            warn_user("ranks had different extra states when they were saved; every rank now gets the first one's")
        for name, value in self.values["extra"].items():
            target = self.extra.get(name)
            if name in self._averages:
                self._averages[name].take_counts(value)
                continue
            restore: Callable[[Any], object] | None = getattr(target, "load_state_dict", None)
            if restore is None:
                self.result.extra[name] = value
                continue
            with reraise_as(f"load_state_dict of extra[{name!r}]", target):
                restore(value)


def _extra_key(path: str) -> str:
    """Return the name that torch's state dicts give to a module's extra state."""
    return f"{path}._extra_state" if path else "_extra_state"


def _as_read(there: Any, read: Any, dtype: torch.dtype, usual: torch.dtype) -> Any:
    """Return a loaded optimizer state with the dtype and type that it has in the checkpoint, where these must stay.

    Args:
        there: the state after torch has loaded it.
        read: the state as read from the checkpoint.
        dtype: dtype of the parameter here, to which torch converts states.
        usual: dtype of the parameter in the checkpoint.
    """
    if isinstance(there, Tensor) and isinstance(read, Tensor):
        # Keep torch's result if the saved state had the parameter's dtype (it then follows the dtype here, too), or if
        # the optimizer itself has converted the state to another dtype. Otherwise restore the saved dtype.
        return there if read.dtype == usual or there.dtype != dtype else read.to(there.device)
    if isinstance(read, str):
        # torch treats a string as a sequence and turns it into the repr of a generator.
        return read
    if isinstance(read, dict) and isinstance(there, dict) and read.keys() == there.keys():
        return {key: _as_read(there[key], each, dtype, usual) for key, each in read.items()}
    if isinstance(read, (list, tuple)) and type(there) is type(read) and len(there) == len(read):
        return type(read)(_as_read(a, b, dtype, usual) for a, b in zip(there, read, strict=True))
    return there


KINDS = ("model", "optimizer", "extra", "random")
"""The parts of a checkpoint that the argument ``only`` of :func:`load` can select."""


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    only: Collection[str] | None = None,
    verify: Verify = "all",
    progress: bool = True,
) -> Loaded:
    """Restore what :func:`zeropp.checkpoint.save` saved. Collective: every rank calls it, between optimizer steps.

    The number of ranks and nodes, stage, units, precision, frozen parameters and order of groups may differ from those
    at the save. Each rank reads only its own shards. With the same ranks and layout, training continues bit for bit.

    Args:
        path: folder of the checkpoint.
        model: model wrapped by a ZeroOptimizer.
        optimizer: the ZeroOptimizer of ``model``; None restores weights only.
        extra: objects by name; each one's ``load_state_dict`` receives the state saved under its name. Saved values
            without such an object are returned in ``Loaded.extra``.
        strict: raise if model and checkpoint have different tensors, or ``extra`` has names that were not saved.
        only: names of the parts to load, out of "model", "optimizer", "extra" and "random"; None for all.
        verify: "all" verifies the checksums of all files. "sample" verifies one in 16 of the stretches (1 MiB) that are
            read. "none" verifies nothing.
        progress: show a bar on rank 0 after two seconds, if tqdm is installed.

    Returns:
        Values, and names of missing and unexpected tensors.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or does not fit; raised on every rank. The message says
            if values have changed.
        RuntimeError: the call is inside a pass, or ranks are at different calls.
        TypeError, ValueError: an argument is invalid.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.load()")
    # Sorted, because the iteration order of a set of strings differs between processes.
    kinds = only if only is None or isinstance(only, str) else sorted(map(str, only))
    engine.agreement.require_same_call(f"checkpoint.load(..., strict={strict}, only={kinds}, {verify!r})")
    # Ranks compare the paths before links are resolved, because nodes may have different links to one disk. realpath
    # accepts "a/../b" even if a does not exist, as save() does.
    folder = Path(os.path.realpath(common_path(engine, path, "checkpoint.load()")))
    if engine in backgrounds:
        wait_together(engine, "nothing was changed")
    unfreeze(engine, optimizer)
    shown = Progress(f"loading {folder.name}", progress and engine.comm.rank == 0)

    def prepare() -> Restore:
        kinds = _kinds(only)
        if only is not None and "optimizer" in kinds and optimizer is None:
            raise ValueError(f"only is {only!r}, and no optimizer is given; give the model's ZeroOptimizer")
        source = TensorReader(folder, Metadata.read(folder), verify, shown)
        source.check_sizes(engine.comm.rank, engine.comm.world)
        return Restore(engine, model, require_ours(engine, optimizer), extra or {}, source, strict, kinds)

    return _run(engine, f"loading the checkpoint {str(folder)!r}", shown, prepare)


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, progress: bool = True
) -> Loaded:
    """Load weights and buffers from safetensors files in Hugging Face's layout directly into the shards.

    Collective: every rank calls it, between optimizer steps. Each rank reads only its own shards. Names in the files
    are those of the plain model's ``state_dict()``, with any name of a tied parameter. For transformers' models, names
    and shapes that transformers can convert are accepted as well.

    Args:
        model: model wrapped by a ZeroOptimizer.
        path: a file, or a folder with ``model.safetensors``, with an index, or with any safetensors files.
        strict: raise if the model and the files have different tensors.
        progress: show a bar on rank 0 after two seconds, if tqdm is installed.

    Returns:
        Names of missing and unexpected tensors, and the bytes that were read.

    Raises:
        CheckpointError: files are missing, damaged, or do not fit the model; raised on every rank.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.load_safetensors()")
    engine.agreement.require_same_call(f"checkpoint.load_safetensors(..., strict={strict})")
    place = common_path(engine, path, "checkpoint.load_safetensors()")
    shown = Progress(f"loading {place.name}", progress and engine.comm.rank == 0)

    def prepare() -> Restore:
        source = foreign_source(place, model, None, strict, prefix=None, safetensors=True)
        source.progress = shown
        return Restore(engine, model, None, {}, source, strict, frozenset(["model"]))

    return _run(engine, f"loading {str(place)!r}", shown, prepare)


def load_foreign(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    prefix: str | None = None,
    progress: bool = True,
) -> Loaded:
    """Load a checkpoint of another program directly into the shards. Collective: every rank calls it, between steps.

    Supported are files of ``torch.save``, folders of torch.distributed.checkpoint (FSDP2, torchtitan), folders of
    DeepSpeed (ZeRO stages 1 to 3), and safetensors. Each rank reads only its own shards. Files are unpickled without
    running any code that they name.

    Args:
        path: a file or a folder. For DeepSpeed, the folder with the file ``latest``, or the folder of one tag.
        model: model wrapped by a ZeroOptimizer.
        optimizer: the ZeroOptimizer of ``model``, to load its states and settings; None loads weights only.
        strict: raise if the model and the files have different tensors, or if there are no states for ``optimizer``.
        prefix: prefix of the model's names in the files, such as ``"model."``, if the files contain other tensors, too.
            None takes the prefix under which most of the model's names are found.
        progress: show a bar on rank 0 after two seconds, if tqdm is installed.

    Returns:
        Names of missing and unexpected tensors and of parameters without states, and the bytes that were read.

    Raises:
        CheckpointError: the format is unknown, or the files are damaged, do not fit the model, or name code; raised on
            every rank.
    """
    engine = engine_of(model)
    engine.require_idle("checkpoint.load_foreign()")
    engine.agreement.require_same_call(f"checkpoint.load_foreign(..., strict={strict}, prefix={prefix!r})")
    place = common_path(engine, path, "checkpoint.load_foreign()")
    unfreeze(engine, optimizer)
    shown = Progress(f"loading {place.name}", progress and engine.comm.rank == 0)

    def prepare() -> Restore:
        ours = require_ours(engine, optimizer)
        source = foreign_source(place, model, ours, strict, prefix)
        source.progress = shown
        work = Restore(engine, model, ours, {}, source, strict, frozenset(["model", "optimizer"]))
        if source.locate is not None:
            # Each box of torch.distributed.checkpoint has its own header and may be damaged. Reading all headers now
            # finds that before anything changes.
            work.look_up()
        return work

    return _run(engine, f"loading {str(place)!r}", shown, prepare)


@torch.inference_mode(False)  # the optimizer's step could not write to states made in inference mode
def _run(engine: Engine, doing: str, shown: Progress, prepare: Callable[[], Restore]) -> Loaded:
    work = run_between_passes(engine, doing, prepare, "nothing was changed", at_disk=shown)
    engine.finish_load()
    engine.start_delayed_refresh()
    # A refresh in flight reads the main weights that the load is about to overwrite.
    engine.wait_for_refresh()
    # Read on all ranks at once, or on one rank of each node after the other (pipeline_loading_checkpoint).
    turns = engine.comm.local if engine.options.loads_in_turns else 1
    try:
        for turn in range(turns):
            reads = work.read_values if engine.comm.rank % turns == turn else lambda: None
            run_between_passes(engine, doing, reads, IN_PART, at_disk=shown)
    finally:
        shown.close()
    work.finish_restore(doing)
    return work.result


def _kinds(only: Collection[str] | None) -> frozenset[str]:
    """Check the argument ``only`` of :func:`load` and return it as a set; all kinds for None."""
    if only is None:
        return frozenset(KINDS)
    wrong = [each for each in only if each not in KINDS] if not isinstance(only, str) else [only]
    if wrong:
        raise ValueError(f"only is {only!r}; expected some of {', '.join(map(repr, KINDS))}, as a list")
    return frozenset(only)
