"""Whole values of a partitioned model: ``model.state_dict()``, ``load_state_dict`` and ``full_state``.

Saving gathers one unit at a time on every rank. Loading sends no values: each rank takes its own piece of those it
is given, straight into its main weights. Both begin with an exchange, by which every rank knows that all are there.

A model may be wrapped without values (on the meta device). Its values must be loaded before the first forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from zeropp._compat import uncompiled
from zeropp.access.refusals import replace_in
from zeropp.comm.hops import Ledger
from zeropp.comm.streams import Work
from zeropp.engine.engine import Engine, engine_of
from zeropp.engine.preconditions import NOTHING
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.guard import is_guarded
from zeropp.params.sharded_build import piece_of
from zeropp.params.unit import FlatBuffer, Unit
from zeropp.wire.paths import GatherPath

__all__ = [
    "awaited_names",
    "comm_report",
    "full_state",
    "gather_codes",
    "gather_computed",
    "gather_main",
    "gather_row",
    "install_state_hooks",
    "lacks_values",
    "refuse_until_loaded",
    "require_values",
]


def comm_report(model: nn.Module | Optimizer) -> Ledger:
    """Bytes that this rank has sent for a model, per unit, hop and class of link; ``str()`` of it is a table.

    Args:
        model: wrapped, or its ZeroOptimizer.
    """
    engine = engine_of(model)
    engine.agreement.stalls.collect()
    return engine.comm.ledger


@uncompiled
def full_state(model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = True) -> dict[str, Tensor]:
    """Whole main weights and buffers of a partitioned model. Collective: call it on every rank.

    Args:
        model: wrapped by a ZeroOptimizer.
        rank0_only: return an empty dict on other ranks; the values still travel to all, one unit at a time.
        cpu_offload: on CPU; otherwise on the model's device, which then has the whole model.

    Returns:
        True names and shapes, as ``state_dict()`` of the plain model would have; trainable parameters in float32
        (float64 for float64 models) whatever the compute dtype, everything else in its own dtype.
    """
    engine = engine_of(model)
    engine.require_idle("full_state", averaged=True, needs=NOTHING)
    engine.agreement.require_same_call("full_state()")
    keep = not rank0_only or engine.comm.rank == 0
    device = torch.device("cpu") if cpu_offload else engine.device
    values: dict[int, Tensor] = {}
    for buffer in engine.buffers:
        for parameter, value in zip(buffer.parameters, gather_main(engine, buffer), strict=True):
            if keep:
                # A copy, also of what is there: a view would keep its whole buffer.
                values[id(parameter)] = value.to(device, copy=True)
    # Not before: gathering is collective, whoever wants the result.
    if not keep:
        return {}
    state = {}
    for name, tensor in _named_state(model):
        if id(tensor) not in values:
            values[id(tensor)] = tensor.detach().to(device, copy=True)
        state[name] = values[id(tensor)]
    return state


def gather_main(engine: Engine, buffer: FlatBuffer) -> list[Tensor]:
    """Every parameter of a buffer in the main dtype. On the comm streams of gathers, whose collectives keep one
    order.
    """
    return gather_row(engine, buffer, engine.parking.values(buffer.shard), buffer.main_dtype)


def gather_computed(engine: Engine, buffer: FlatBuffer) -> list[Tensor]:
    """Every parameter of a buffer, rounded to the dtype that it is computed with."""
    # What codes stand for is rounded behind the way; values are on it, before anything travels.
    if isinstance(buffer, CodedBuffer):
        return [value.to(buffer.compute_dtype) for value in gather_main(engine, buffer)]
    return gather_row(engine, buffer, engine.parking.values(buffer.shard), buffer.compute_dtype)


def gather_row(engine: Engine, buffer: FlatBuffer, row: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Whole values of a buffer's parameters, gathered from rows that lie as main weights do: gradients, or states.

    Args:
        engine: of the buffer.
        buffer: whose layout the row has.
        row: this rank's part.
        dtype: that travels, and of the result; None for the row's. Of codes, what they are decoded to.
    """
    # Comm streams of gathers write to it, outside the caller's mode.
    with torch.inference_mode(False):
        whole = torch.empty(buffer.layout.numel, dtype=dtype or row.dtype, device=buffer.device)
    _gather_whole(engine, buffer, buffer.paths.main, whole, row)
    return buffer.layout.views(whole)


def gather_codes(engine: Engine, buffer: FlatBuffer) -> Tensor | None:
    """Messages of all pieces of a buffer that exists in codes; None of any other."""
    if not isinstance(buffer, CodedBuffer):
        return None
    messages = buffer.codes.empty(buffer.layout.numel, buffer.device)
    _gather_whole(engine, buffer, buffer.codes, messages, engine.parking.values(buffer.shard))
    return messages


def _gather_whole(engine: Engine, buffer: FlatBuffer, path: GatherPath, whole: Tensor, own: Tensor) -> None:
    with engine.agreement.watching("gathering", buffer.unit):
        gather = path.gather(own, path.places(whole), f"{buffer.unit} <state>")
        # On the same comm streams as gathers of a pass: a group's collectives must have one order. See
        # [Note: one order].
        event = engine.comm_streams["gather"].run_work(Work(path.links, [gather]))[-1]
    engine.agreement.monitors(event, f"unit {buffer.unit!r} for a state dict")
    engine.agreement.wait_for_event(event.wait, f"gathering unit {buffer.unit!r} for a state dict")


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names as in ``state_dict()``: tied parameters under each name, persistent buffers only."""
    # Modules used twice and parameters that are tied have each of their names in a state dict.
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


class _Saving:
    """``state_dict`` of modules that hold parameters themselves.

    Gathered buffers stay while modules of the same unit follow; persistent ones until the end. A parameter that stands
    under several names is copied once, and its entries share the copy's memory, as those of a plain model do.

    It is collective, but for what this rank has all of: inside GatheredParameters, and behind a training engine where
    weights are cached whole. A stand-in's is local anyway, since scripts of DeepSpeed's ask one on one rank alone, to
    learn its names: weights that are not here stand in it themselves, and refuse to be read.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = weakref.ref(engine)
        self.outermost: nn.Module | None = None
        self.local = False
        self.gathered: dict[FlatBuffer, list[Tensor]] = {}
        self.lasting: set[FlatBuffer] = set()
        # By the parameter's id. Weakly: a hook may take entries out of the state dict again to save memory.
        self.copies: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def begin_module(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before a module's state_dict."""
        engine = _alive(self.engine)
        engine.require_idle("state_dict()", inside_gather=True, averaged=True, needs=NOTHING)
        if keep_vars:
            raise RuntimeError(
                "state_dict(keep_vars=True) asks for the live parameters, whose values zeropp keeps elsewhere; leave "
                "keep_vars out to get whole copies"
            )
        if self.outermost is None or prefix == "":
            # A call that failed left these: torch runs no hooks after an error, so its end never came.
            self._forget()
            self.local = _is_local(engine, module)
            if not self.local:
                engine.agreement.require_same_call(f"state_dict() of a {type(module).__name__}")
            self.outermost = module

    def end_module(self, module: nn.Module) -> None:
        """After a module's state_dict, children included."""
        if module is self.outermost:
            self.outermost = None
            self._forget()

    def _forget(self) -> None:
        self.gathered.clear()
        self.copies.clear()

    def save_of(self, module: nn.Module) -> Callable[[dict[str, Tensor], str, bool], None]:
        """``save`` for one module, without keeping it alive."""
        # The module holds this function in its __dict__.
        ref = weakref.ref(module)

        def save(destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
            target = ref()
            assert target is not None  # it is calling
            self.save(target, destination, prefix, keep_vars)

        return save

    def save(self, module: nn.Module, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        """Do what ``_save_to_state_dict`` does, with whole values in the compute dtype."""
        engine = _alive(self.engine)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            unit = engine.unit_of.get(id(parameter))
            if unit is None:
                # What no unit has, an integer parameter for one, is whole as it is.
                destination[prefix + name] = parameter.detach()
                continue
            made = self.copies.get(id(parameter))
            if made is None:
                made = self.copies[id(parameter)] = self._copy(engine, parameter, unit)
            elif made is not parameter:
                # Another tensor in the same memory, as torch has it for each name.
                made = made.detach()
            destination[prefix + name] = made
        parameters = module._parameters
        try:
            # Buffers and extra state the class saves itself, with whatever a subclass adds; it must not see released
            # parameters.
            module.__dict__["_parameters"] = {}
            type(module)._save_to_state_dict(module, destination, prefix, keep_vars)
        finally:
            module.__dict__["_parameters"] = parameters

    def _copy(self, engine: Engine, parameter: nn.Parameter, unit: Unit) -> Tensor:
        if self.local:
            return _here(engine, parameter)
        buffer, index = unit.place_of(parameter)
        # As the plain model has it; full_state gives the main weights. A copy: a view would keep its whole flat
        # buffer in the state dict.
        return self._whole(engine, buffer, unit)[index].to(buffer.compute_dtype, copy=True)

    def _whole(self, engine: Engine, buffer: FlatBuffer, unit: Unit) -> list[Tensor]:
        if buffer not in self.gathered:
            # Others lie all over the model, and are small.
            if unit.hooked:
                for other in [b for b in self.gathered if b.unit != buffer.unit and b not in self.lasting]:
                    del self.gathered[other]
            else:
                self.lasting.add(buffer)
            self.gathered[buffer] = gather_main(engine, buffer)
        return self.gathered[buffer]


def _is_local(engine: Engine, module: nn.Module) -> bool:
    """Tell whether a ``state_dict()`` takes no other rank; the same on every rank that asks for it."""
    readable_weights = engine.readable_weights
    if engine.gather_contexts or (readable_weights is not None and readable_weights.alone):
        return True
    # Differences may leave the cache apart from the main weights, which a state is made of.
    exact = all(buffer.paths.differences is None for buffer in engine.trainable_buffers)
    if readable_weights is None or not exact:
        return False
    return all(id(p) not in engine.unit_of or engine.cached_values(p) is not None for p in module.parameters())


def _here(engine: Engine, parameter: nn.Parameter) -> Tensor:
    """A copy of what this rank has of a parameter, if that is all of it; else the parameter, with its shape alone."""
    if not is_guarded(parameter):
        return parameter.detach().clone()
    values = engine.cached_values(parameter)
    return parameter if values is None else values.detach().clone()


class _Loading:
    """``load_state_dict`` of any module of the model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = weakref.ref(engine)
        self.outermost: nn.Module | None = None

    def begin_module(
        self, module: nn.Module, state_dict: object, prefix: str, metadata: Mapping[str, object], *_: object
    ) -> None:
        """Before a module's own values are loaded."""
        engine = _alive(self.engine)
        if engine.gather_contexts:
            # torch copies into gathered values; GatheredParameters decides what becomes of them.
            return
        engine.require_idle("load_state_dict()")
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the parameters that zeropp manages; leave assign out: "
                "values are copied into the main weights, in their precision"
            )
        if self.outermost is None or prefix == "":
            engine.agreement.require_same_call(f"load_state_dict() of a {type(module).__name__}")
            # Loading writes to shards: what an earlier load left must be known, and no refresh may be reading.
            engine.finish_load()
            engine.wait_for_refresh()
            self.outermost = module
            engine.begin_load()

    def end_module(self, module: nn.Module, incompatible: object) -> None:
        """After a module and its children are loaded."""
        if module is self.outermost:
            engine = _alive(self.engine)
            self.outermost = None
            # All buffers: which were loaded, only the guard has seen.
            engine.finish_load()


def _alive(ref: weakref.ref[Engine]) -> Engine:
    engine = ref()
    if engine is None:
        raise RuntimeError("what held this model's values is gone; keep the model, or any module of it")
    return engine


def install_state_hooks(modules: Sequence[nn.Module], engine: Engine) -> None:
    """Make ``state_dict`` and ``load_state_dict`` of these modules see whole parameters."""
    saving = _Saving(engine)
    loading = _Loading(engine)
    before = saving.begin_module
    load = loading.begin_module
    loaded = loading.end_module

    # torch marks the hook itself, so it must be a function.
    def saved(module: nn.Module, *_: object) -> None:
        saving.end_module(module)

    for module in modules:
        engine.keep_handle(module.register_state_dict_pre_hook(before))
        engine.keep_handle(module.register_state_dict_post_hook(saved))
        engine.keep_handle(module.register_load_state_dict_pre_hook(load))
        engine.keep_handle(module.register_load_state_dict_post_hook(loaded))
    replace_in([each for each in modules if each._parameters], engine, "_save_to_state_dict", saving.save_of)


def awaited_names(parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Parameters that have no values until they are loaded."""
    found = ((name, piece_of(parameter)) for name, parameter in parameters.items())
    return frozenset(name for name, piece in found if piece is not None and piece.awaited)


def refuse_until_loaded(model: nn.Module, engine: Engine, names: frozenset[str]) -> None:
    """Refuse forwards of the model, and of modules of it, until all parameters of these names have values everywhere.

    Buffers, too, which have NaN until they are loaded.
    """
    if not names:
        return
    awaited = _awaited[engine] = _MetaParams(engine, model, names)
    for module in model.modules():
        # Any of them may be called from outside.
        awaited.handles.append(module.register_forward_pre_hook(torch.compiler.disable(awaited.before), prepend=True))
    engine.on_close(awaited.remove)


def lacks_values(engine: Engine) -> bool:
    """Tell whether this rank's part of some parameter was built without values, and none were loaded. Local."""
    awaited = _awaited.get(engine)
    return awaited is not None and any(_missing(buffer, awaited.names) for buffer in engine.buffers)


def require_values(engine: Engine) -> None:
    """Make sure that all parameters have values, before they are saved. Collective.

    Raises:
        RuntimeError: some were built without, and nothing was loaded.
    """
    awaited = _awaited.get(engine)
    if awaited is not None:
        awaited.check()


class _MetaParams:
    def __init__(self, engine: Engine, model: nn.Module, names: frozenset[str]) -> None:
        self._engine = weakref.ref(engine)
        self._root = weakref.ref(model)
        self.names = names
        self.handles: list[RemovableHandle] = []

    def before(self, module: nn.Module, args: object) -> None:
        engine = self._engine()
        if engine is None:
            return
        engine.notice_failed_backward()
        if not engine.running:
            self.check()

    def check(self) -> None:
        engine = self._engine()
        model = self._root()
        # Without its root the engine is another's, or gone.
        if engine is None or model is None:
            return
        # However they were loaded: there are several ways, and each rank sees its own part.
        missing = {name for buffer in engine.buffers for name in _missing(buffer, self.names)}
        missing |= {name for name, b in model.named_buffers() if b.is_floating_point() and bool(b.isnan().any())}
        rows = engine.agreement.exchange_objects(sorted(missing), "looking whether all weights were loaded")
        lacking = sorted({name for row in rows for name in row})
        if lacking:
            more = f" and {len(lacking) - 10} more" if lacking[10:] else ""
            raise RuntimeError(
                f"{lacking[:10]}{more} were built on the meta device and have no values yet, or NaN; load them before "
                "the first forward, and before they are saved, on every rank: "
                "zeropp.checkpoint.load_safetensors(model, path), zeropp.checkpoint.load(...) or "
                "model.load_state_dict(...)"
            )
        self.remove()
        _awaited.pop(engine, None)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


_awaited: weakref.WeakKeyDictionary[Engine, _MetaParams] = weakref.WeakKeyDictionary()


def _missing(buffer: FlatBuffer, names: frozenset[str]) -> list[str]:
    row = buffer.decoded() if isinstance(buffer, CodedBuffer) else buffer.shard
    found = []
    for each in buffer.fragments():
        name = buffer.names[each.slot]
        # Parameters without values were filled with NaN when the model was built; NaN that is left was never loaded.
        if name in names and row[each.offset : each.offset + each.stop - each.start].isnan().any():
            found.append(name)
    return found
