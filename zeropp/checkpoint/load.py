"""``load``: restore a checkpoint in place, whatever ranks and layout it was saved with."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp.access.state import engine_of
from zeropp.checkpoint.background import backgrounds
from zeropp.checkpoint.coded import CODES, SCALES, Encoded, coded_parts
from zeropp.checkpoint.errors import CheckpointError
from zeropp.checkpoint.foreign import safetensors_metadata
from zeropp.checkpoint.metadata import DTYPES, Metadata
from zeropp.checkpoint.names import compare, match, match_groups, model_names
from zeropp.checkpoint.parts import BASES, MODEL, STATE, Part, base_parts, main_parts, state_parts, whole
from zeropp.checkpoint.random_state import draw_anew, restore_random_state
from zeropp.checkpoint.save import require_ours
from zeropp.checkpoint.source import Source, Verify
from zeropp.checkpoint.together import together
from zeropp.checkpoint.values import decode
from zeropp.config.base import notify
from zeropp.engine.engine import Engine
from zeropp.optimizer.state import layout_id, load_carried
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["KINDS", "Loaded", "load", "load_safetensors"]

KINDS = ("model", "optimizer", "extra", "random")
"""What a checkpoint can be loaded in part by."""


@dataclass
class Loaded:
    """What a load has found.

    Attributes:
        extra: values of the checkpoint that are no objects' states, by name.
        missing: parameters and buffers of the model that the checkpoint does not have; they keep their values.
        unexpected: those of the checkpoint that the model does not have.
        fresh: parameters that are trained and of which the checkpoint has no optimizer states.
        nbytes_read: by this rank.
    """

    extra: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    nbytes_read: int = 0


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    only: Collection[str] | None = None,
    verify: Verify = "all",
) -> Loaded:
    """Restore what :func:`zeropp.checkpoint.save` saved. Collective: every rank calls it, between optimizer steps.

    On any number of ranks, of nodes, in any stage and placement, with other units, precision, frozen parameters or
    order of parameter groups; each rank reads the bytes of its own part. On the same ranks and layout everything goes
    on bit for bit.

    Args:
        path: the directory.
        model: wrapped by a ZeroOptimizer.
        optimizer: that one; without it weights alone are restored.
        extra: objects whose ``load_state_dict`` gets what was saved under their names. Values that are no objects come
            back in the result.
        strict: raise if model and checkpoint have other parameters or buffers, or ``extra`` has names that it has not.
        only: some of "model", "optimizer", "extra" and "random"; None for all that there is.
        verify: check every byte that is read, and of files that nobody reads the rest; or a sample of stretches; or
            nothing.

    Raises:
        CheckpointError: it is no complete checkpoint, damaged, or does not fit; on every rank. The message says whether
            values have changed.
        RuntimeError: called inside a pass, or ranks are at different calls.
        TypeError, ValueError: an argument is wrong.
    """
    engine = engine_of(model)
    folder = Path(path).absolute()
    engine.require_idle("checkpoint.load()")
    engine.agreement.require_same_call(f"checkpoint.load({str(folder)!r}, strict={strict}, only={only}, {verify!r})")
    if engine in backgrounds:
        backgrounds[engine].wait()

    def prepare() -> _Load:
        kinds = _kinds(only)
        source = Source(folder, Metadata.read(folder), verify)
        return _Load(engine, model, require_ours(engine, optimizer), extra or {}, source, strict, kinds)

    return _run(engine, f"loading the checkpoint {str(folder)!r}", prepare)


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Loaded:
    """Read weights and buffers of safetensors files, as Hugging Face has them, straight into the shards.

    Collective, between optimizer steps. Each rank reads the bytes of its own part; names are those of the plain
    model's ``state_dict()``, any of a tied parameter's.

    Args:
        model: wrapped by a ZeroOptimizer.
        path: a file, or a folder with one, with an index, or with any safetensors files.
        strict: raise if model and files have other tensors.

    Raises:
        CheckpointError: files are missing, damaged, or of another model; on every rank.
    """
    engine = engine_of(model)
    place = Path(path).absolute()
    engine.require_idle("checkpoint.load_safetensors()")
    engine.agreement.require_same_call(f"checkpoint.load_safetensors({str(place)!r}, strict={strict})")

    def prepare() -> _Load:
        folder, metadata = safetensors_metadata(place)
        return _Load(engine, model, None, {}, Source(folder, metadata, "none"), strict, frozenset(["model"]))

    return _run(engine, f"loading {str(place)!r}", prepare)


def _run(engine: Engine, doing: str, prepare: Callable[[], _Load]) -> Loaded:
    work = together(engine, doing, prepare, "nothing was changed")
    engine.finish_load()
    engine.refresh.start_put_off()
    # Refreshes read what is about to be written.
    engine.refresh.wait()
    together(engine, doing, work.read, "weights and states are changed in part: load again, or another checkpoint")
    work.finish()
    return work.result


class _Load:
    """One load on one rank: checked when it is made, before anything changes."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        optimizer: ZeroOptimizer | None,
        extra: Mapping[str, Any],
        source: Source,
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
        # The checkpoint's names of the model's tensors.
        self._renamed = match(self.named, aliases, self.metadata)
        self.states: dict[str, dict[str, Any]] = {}
        self.groups: list[dict[str, Any]] = []
        if "model" in self.kinds:
            self.result.missing, self.result.unexpected = compare(
                self.named, aliases, self._renamed, self.metadata, strict
            )
        if self._loads_optimizer:
            assert self.optimizer is not None
            self.groups, self.result.fresh = match_groups(self.optimizer, self.named, self._renamed, self.metadata)
        if strict and "extra" in self.kinds:
            unknown = sorted(extra.keys() - self._saved_extra().keys())
            if unknown:
                raise CheckpointError(
                    f"extra has {unknown}, and the checkpoint has {sorted(self._saved_extra())}; leave them out, or "
                    "load with strict=False"
                )

    @property
    def _loads_optimizer(self) -> bool:
        return self.optimizer is not None and "optimizer" in self.kinds and "groups" in self.metadata.values

    def _own(self) -> dict[str, Any]:
        """What the checkpoint has of this rank, if it was saved by as many."""
        same = self.metadata.world == self.engine.comm.world
        return self.metadata.ranks[self.engine.comm.rank] if same else {}

    def _there(self, parts: Iterator[Part], prefix: str) -> Iterator[Part]:
        """Parts that the checkpoint has, under its names."""
        for part in parts:
            name = self._renamed.get(part.name.removeprefix(prefix))
            coded = prefix == MODEL and name in self.metadata.coded
            if name is not None and (coded or prefix + name in self.metadata.tensors):
                yield Part(prefix + name, part.shape, part.box, part.values)

    # Reading: from here on values change.

    @torch.no_grad()
    def read(self) -> None:
        """Read all that is this rank's into its shards and states."""
        engine = self.engine
        if "model" in self.kinds:
            spread = {name for buffer in engine.buffers for name in buffer.names}
            self.source.read(self._there(main_parts(engine, "slice"), MODEL))
            rest = (whole(MODEL + name, tensor.data) for name, tensor in self.named.items() if name not in spread)
            self.source.read(self._there(rest, MODEL))
            self._read_codes()
            self.source.read(self._there(base_parts(engine, "slice"), BASES))
        if self._loads_optimizer:
            self.source.read(self._states())
        self.source.verify_rest(engine.comm.rank, engine.comm.world)

    def _read_codes(self) -> None:
        """What is in codes here: of codes as they are, of values encoded."""
        encoded = Encoded(self.engine, self._renamed, self.metadata)
        values = {part.name.removeprefix(MODEL) for part in encoded.parts}
        for prefix in (CODES, SCALES):
            parts = (part for part in coded_parts(self.engine, "slice") if part.name.startswith(prefix))
            fitting = (part for part in parts if part.name.removeprefix(prefix) not in values)
            self.source.read(self._there(fitting, prefix))
        self.source.read(self._there(iter(encoded.parts), MODEL))
        encoded.encode()

    def _states(self) -> Iterator[Part]:
        """Parts of the optimizer's states, in tensors made for them."""
        optimizer = self.optimizer
        assert optimizer is not None
        keys = self._keys()
        rows: list[tuple[str, str, Tensor]] = []
        for part in optimizer.slices.cut:
            for key, dtype in keys.get(self._renamed.get(part.name, ""), {}).items():
                tensor = torch.empty(part.parameter.shape, dtype=dtype, device=part.parameter.device)
                rows.append((part.name, key, tensor))
                self.states.setdefault(part.name, {})[key] = tensor
        numbers = {name: state for rank in self.metadata.ranks for name, state in rank.get("numbers", {}).items()}
        for name, there in self._renamed.items():
            for key, value in numbers.get(there, {}).items():
                self.states.setdefault(name, {})[key] = decode(value, self.source.tensor)
        for piece in state_parts(self.engine, rows, "slice"):
            name, _, key = piece.name.removeprefix(STATE).rpartition(".")
            yield Part(f"{STATE}{self._renamed[name]}.{key}", piece.shape, piece.box, piece.values)

    def _keys(self) -> dict[str, dict[str, torch.dtype]]:
        """By parameter the keys of its states that have an element for each of its own, with their dtypes."""
        ranks = self.metadata.ranks
        numbers = {(name, key) for rank in ranks for name, found in rank.get("numbers", {}).items() for key in found}
        keys: dict[str, dict[str, torch.dtype]] = {}
        for full, entry in self.metadata.tensors.items():
            if full.startswith(STATE):
                name, _, key = full.removeprefix(STATE).rpartition(".")
                if (name, key) not in numbers:
                    keys.setdefault(name, {})[key] = DTYPES[entry.dtype]
        return keys

    # Afterwards, on all ranks alike.

    def finish(self) -> None:
        """Let everything follow from what was read."""
        own = self._own()
        if "model" in self.kinds:
            # First, since they may be modules' own tensors.
            self._load_modules()
            self._weights_changed()
        if self._loads_optimizer:
            self._load_optimizer(own)
        if "random" in self.kinds:
            self._load_random(own)
        if "extra" in self.kinds:
            self._load_extra(own)
        if self.optimizer is not None:
            self.optimizer.zero_grad(now=True)
        self.result.nbytes_read = self.source.nbytes_read

    def _weights_changed(self) -> None:
        engine = self.engine
        engine.weights_changed(engine.buffers, for_now=True)
        for buffer in engine.trainable_buffers:
            names = [BASES + self._renamed.get(name, "") for name in buffer.names]
            if buffer.base is not None and not buffer.counts_escapes and all(n in self.metadata.tensors for n in names):
                # What others hold of these weights is as it was, and needs no renewal, which would move it.
                buffer.cache_restored()
        engine.refresh.start_put_off()

    def _load_modules(self) -> None:
        states = self.metadata.values.get("modules", {})
        modules = dict(self.model.named_modules())
        for path, state in states.items():
            if path in modules:
                modules[path].set_extra_state(decode(state, self.source.tensor))

    def _load_optimizer(self, own: dict[str, Any]) -> None:
        optimizer = self.optimizer
        assert optimizer is not None
        inner, state, groups, index = optimizer.inner, {}, [], 0
        names = {part.parameter: part.name for part in optimizer.slices.cut}
        for group, saved in zip(inner.param_groups, self.groups, strict=True):
            settings = decode(saved, self.source.tensor)
            kept = {key: value for key, value in group.items() if key != "params"}
            numbers = []
            for parameter in group["params"]:
                found = self.states.get(names.get(parameter, ""))
                if found:
                    state[index] = {
                        k: v.clone() if isinstance(v, Tensor) and not v.dim() else v for k, v in found.items()
                    }
                numbers.append(index)
                index += 1
            groups.append({**kept, **settings, "params": numbers})
        inner.load_state_dict({"state": state, "param_groups": groups})
        optimizer.outcome.load(self.metadata.values["skipped_steps"])
        carried = own.get("carried") if own.get("layout") == layout_id(self.engine) else None
        load_carried(self.engine, optimizer.carried, None if carried is None else decode(carried, self.source.tensor))

    def _load_random(self, own: dict[str, Any]) -> None:
        comm = self.engine.comm
        if own:
            restore_random_state(decode(own["random"], self.source.tensor), self.engine.device)
            return
        if comm.rank == 0:
            notify(
                f"the checkpoint was saved by {self.metadata.world} ranks and is loaded by {comm.world}: random "
                "numbers begin anew, from seeds made of the saved one"
            )
        draw_anew(decode(self.metadata.ranks[0]["random"], self.source.tensor), comm.rank, comm.world)

    def _saved_extra(self) -> dict[str, Any]:
        return {**self.metadata.values.get("extra", {}), **self._own().get("extra", {})}

    def _load_extra(self, own: dict[str, Any]) -> None:
        if not own and any("extra" in rank for rank in self.metadata.ranks) and self.engine.comm.rank == 0:
            notify("ranks had different extra states when they were saved; every rank now gets the first one's")
        for name, encoded in self._saved_extra().items():
            value, target = decode(encoded, self.source.tensor), self.extra.get(name)
            restore: Callable[[Any], object] | None = getattr(target, "load_state_dict", None)
            if restore is not None:
                restore(value)
            else:
                self.result.extra[name] = value


def _kinds(only: Collection[str] | None) -> frozenset[str]:
    if only is None:
        return frozenset(KINDS)
    wrong = [each for each in only if each not in KINDS] if not isinstance(only, str) else [only]
    if wrong:
        raise ValueError(f"only is {only!r}; expected some of {', '.join(map(repr, KINDS))}, as a list")
    return frozenset(only)
