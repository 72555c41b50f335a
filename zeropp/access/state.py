"""Whole values of a sharded model: ``model.state_dict()``, ``load_state_dict`` and ``full_state``.

Saving gathers one unit at a time on every rank. Loading sends no values: each rank copies its own shards from the given
state dict into its main weights. Both start with an exchange, which checks that all ranks make the same call.

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
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.guard import is_guarded
from zeropp.params.sharded_build import piece_of
from zeropp.params.unit import Unit
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
    """Return the communication of a model so far: calls, bytes and waiting times per unit and hop, for this rank.

    Args:
        model: a wrapped model or its ZeroOptimizer.

    Returns:
        The ledger of this rank. ``str()`` formats it as a table.
    """
    engine = engine_of(model)
    if (stalls := engine.agreement.stalls) is not None:
        stalls.collect()
    return engine.comm.ledger


@uncompiled
def full_state(model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = True) -> dict[str, Tensor]:
    """Return the whole main weights and module buffers of a sharded model. Collective: call it on every rank.

    Args:
        model: a model wrapped by a ZeroOptimizer.
        rank0_only: True to return an empty dict on all ranks but the first. Each rank still gathers every unit.
        cpu_offload: True to return tensors on the CPU; False to keep them on the model's device, which then holds the
            whole model.

    Returns:
        A dict with the names and shapes of the plain model's ``state_dict()``. Trainable parameters have the main dtype
        (float32, or float64 for float64 models, unless main weights are in 16 bits); other tensors have their own
        dtype.

    Raises:
        RuntimeError: a pass is running, or other ranks make another call.
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
                # Always copy: a view would keep the memory of its whole flat buffer.
                values[id(parameter)] = value.to(device, copy=True)
    # Return only after the gathers, which are collective.
    if not keep:
        return {}
    state = {}
    for name, tensor in _named_state(model):
        if id(tensor) not in values:
            values[id(tensor)] = tensor.detach().to(device, copy=True)
        state[name] = values[id(tensor)]
    return state


def gather_main(engine: Engine, buffer: FlatBuffer) -> list[Tensor]:
    """Gather the main weights of all parameters of a flat buffer, in the main dtype. Collective."""
    return gather_row(engine, buffer, engine.parking.values(buffer.shard), buffer.main_dtype)


def gather_computed(engine: Engine, buffer: FlatBuffer) -> list[Tensor]:
    """Gather the weights of all parameters of a flat buffer, in the compute dtype. Collective."""
    # A coded buffer is decoded after the gather and rounded then. Other shards are rounded before they are sent.
    if isinstance(buffer, CodedBuffer):
        return [value.to(buffer.compute_dtype) for value in gather_main(engine, buffer)]
    return gather_row(engine, buffer, engine.parking.values(buffer.shard), buffer.compute_dtype)


def gather_row(engine: Engine, buffer: FlatBuffer, row: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Gather whole values of a flat buffer's parameters from shards: main weights, gradients or optimizer states.

    Collective over the engine's ranks.

    Args:
        engine: engine of the buffer.
        buffer: flat buffer with the layout of the shard.
        row: this rank's shard.
        dtype: dtype of the messages and of the result; None for the shard's dtype. For codes, the dtype of the result.

    Returns:
        One tensor for each parameter of the buffer. All are views of one tensor.
    """
    # The comm streams of gathers write to this tensor outside of the caller's inference mode, so it must be a normal
    # one.
    with torch.inference_mode(False):
        whole = torch.empty(buffer.layout.numel, dtype=dtype or row.dtype, device=buffer.device)
    _gather_whole(engine, buffer, buffer.paths.main, whole, row)
    return buffer.layout.views(whole)


def gather_codes(engine: Engine, buffer: FlatBuffer) -> Tensor | None:
    """Gather the codec messages of all shards of a coded buffer (uint8); return None for other buffers. Collective."""
    if not isinstance(buffer, CodedBuffer):
        return None
    messages = buffer.codes.empty(buffer.layout.numel, buffer.device)
    _gather_whole(engine, buffer, buffer.codes, messages, engine.parking.values(buffer.shard))
    return messages


def _gather_whole(engine: Engine, buffer: FlatBuffer, path: GatherPath, whole: Tensor, own: Tensor) -> None:
    with engine.agreement.watching("gathering", buffer.unit):
        gather = path.stages(own, path.places(whole), f"{buffer.unit} <state>")
        # Use the comm streams of the gathers in passes: all collectives of a process group must have one order. See
        # [Note: one order].
        event = engine.comm_streams["gather"].run_work(Work(path.links, [gather]))
    engine.agreement.monitors(event, f"unit {buffer.unit!r} for a state dict")
    doing = f"gathering unit {buffer.unit!r} for a state dict"
    engine.agreement.wait_for_event(event.wait, engine.agreement.watching(doing))


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the names and tensors of a ``state_dict()``: parameters and persistent buffers."""
    # A state dict lists shared modules and tied parameters under each of their names.
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


class _Saving:
    """Implementation of ``state_dict`` for the modules of a wrapped model.

    A gathered flat buffer is kept while modules of the same unit follow; the buffers of persistent parameters are kept
    until the end. A parameter with several names is copied once, and its entries share the memory of the copy, as in a
    plain model.

    The call is collective unless this rank has all values: inside GatheredParameters, or with an engine of
    ``zeropp.initialize`` if the weights are cached whole. With the stand-in for the package deepspeed the call is
    always local, because DeepSpeed scripts call ``state_dict()`` on one rank to read the names. Weights that are not on
    this rank then appear as the guarded parameters, which raise an error when their values are read.

    Attributes:
        engine: weak reference to the engine.
        outermost: module on which ``state_dict()`` was called; None between calls.
        local: True if the running call is local.
        gathered: whole values of gathered flat buffers.
        lasting: flat buffers whose values are kept until the end of the call.
        copies: copies of parameters by id.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = weakref.ref(engine)
        self.outermost: nn.Module | None = None
        self.local = False
        self.gathered: dict[FlatBuffer, list[Tensor]] = {}
        self.lasting: set[FlatBuffer] = set()
        # Weak references, because a hook may remove entries from the state dict to save memory.
        self.copies: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def begin_module(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Hook that runs before the ``state_dict()`` of each module; checks the call and starts an outermost one."""
        engine = _alive(self.engine)
        engine.require_idle("state_dict()", inside_gather=True, averaged=True, needs=NOTHING)
        if keep_vars:
            raise RuntimeError(
                "state_dict(keep_vars=True) asks for the live parameters, but zeropp stores their values in shards; "
                "leave keep_vars out to get whole copies"
            )
        if self.outermost is None or prefix == "":
            # Drop the values of an earlier call that failed. PyTorch calls no post-hooks after an error.
            self._forget()
            self.local = _is_local(engine, module)
            if not self.local:
                engine.agreement.require_same_call(f"state_dict() of a {type(module).__name__}")
            self.outermost = module

    def end_module(self, module: nn.Module) -> None:
        """Hook that runs after the ``state_dict()`` of each module and its children; ends an outermost call."""
        if module is self.outermost:
            self.outermost = None
            self._forget()

    def _forget(self) -> None:
        self.gathered.clear()
        self.copies.clear()

    def save_of(self, module: nn.Module) -> Callable[[dict[str, Tensor], str, bool], None]:
        """Return the replacement of ``_save_to_state_dict`` for one module. It holds the module weakly."""
        # The module stores this function in its __dict__, so a strong reference would be a cycle.
        ref = weakref.ref(module)

        def save(destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
            target = ref()
            assert target is not None  # the module is calling this function
            self.save(target, destination, prefix, keep_vars)

        return save

    def save(self, module: nn.Module, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        """Write a module's entries of the state dict, with whole parameters in the compute dtype.

        Args:
            module: the module, without its children.
            destination: state dict to write to.
            prefix: name of the module in the outermost one, with a dot at the end.
            keep_vars: always False; see :meth:`begin_module`.
        """
        engine = _alive(self.engine)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            unit = engine.unit_of.get(id(parameter))
            if unit is None:
                # A parameter without a unit, such as an integer parameter, is not sharded.
                destination[prefix + name] = parameter.detach()
                continue
            made = self.copies.get(id(parameter))
            if made is None:
                made = self.copies[id(parameter)] = self._copy(engine, parameter, unit)
            elif made is not parameter:
                # For a further name, add another tensor object with the same memory, as PyTorch does.
                made = made.detach()
            destination[prefix + name] = made
        parameters = module._parameters
        try:
            # Let the module's class save buffers, extra state and additions of subclasses. Hide the parameters from it,
            # because it would read sharded ones.
            module.__dict__["_parameters"] = {}
            type(module)._save_to_state_dict(module, destination, prefix, keep_vars)
        finally:
            module.__dict__["_parameters"] = parameters

    def _copy(self, engine: Engine, parameter: nn.Parameter, unit: Unit) -> Tensor:
        if self.local:
            return _here(engine, parameter)
        buffer, index = unit.place_of(parameter)
        # Return the compute dtype, as the plain model would have; full_state returns main weights. Copy the values: a
        # view would keep the memory of the whole flat buffer.
        return self._whole(engine, buffer, unit)[index].to(buffer.compute_dtype, copy=True)

    def _whole(self, engine: Engine, buffer: FlatBuffer, unit: Unit) -> list[Tensor]:
        if buffer not in self.gathered:
            # Drop gathered buffers of earlier units. Persistent parameters are small and belong to modules all over the
            # model, so their buffers are kept.
            if unit.hooked:
                for other in [b for b in self.gathered if b.unit != buffer.unit and b not in self.lasting]:
                    del self.gathered[other]
            else:
                self.lasting.add(buffer)
            self.gathered[buffer] = gather_main(engine, buffer)
        return self.gathered[buffer]


def _is_local(engine: Engine, module: nn.Module) -> bool:
    """Return True if ``state_dict()`` of a module needs no other rank. The result is equal on all ranks."""
    readable_weights = engine.readable_weights
    if engine.gather_contexts or (readable_weights is not None and readable_weights.alone):
        return True
    # With a codec of differences, cached weights may differ from the main weights, so they must not be saved.
    exact = all(buffer.paths.differences is None for buffer in engine.trainable_buffers)
    if readable_weights is None or not exact:
        return False
    return all(id(p) not in engine.unit_of or engine.cached_values(p) is not None for p in module.parameters())


def _here(engine: Engine, parameter: nn.Parameter) -> Tensor:
    """Return a copy of a parameter's whole values if this rank has them; otherwise the guarded parameter itself."""
    if not is_guarded(parameter):
        return parameter.detach().clone()
    values = engine.cached_values(parameter)
    return parameter if values is None else values.detach().clone()


class _Loading:
    """Implementation of ``load_state_dict`` for the modules of a wrapped model.

    Attributes:
        engine: weak reference to the engine.
        outermost: module on which ``load_state_dict()`` was called; None between calls.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = weakref.ref(engine)
        self.outermost: nn.Module | None = None

    def begin_module(
        self, module: nn.Module, state_dict: object, prefix: str, metadata: Mapping[str, object], *_: object
    ) -> None:
        """Hook that runs before the values of each module are loaded; starts an outermost call."""
        engine = _alive(self.engine)
        if engine.gather_contexts:
            # PyTorch copies into the gathered values, as edits. GatheredParameters handles them at its end.
            return
        engine.require_idle("load_state_dict()")
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the parameters that zeropp manages; leave assign out: "
                "values are copied into the main weights, in their precision"
            )
        if self.outermost is None or prefix == "":
            engine.agreement.require_same_call(f"load_state_dict() of a {type(module).__name__}")
            # Loading writes to the shards. So finish an earlier load that failed, and wait for refreshes that read
            # them.
            engine.finish_load()
            engine.wait_for_refresh()
            self.outermost = module
            engine.begin_load()

    def end_module(self, module: nn.Module, incompatible: object) -> None:
        """Hook that runs after a module and its children are loaded; ends an outermost call."""
        if module is self.outermost:
            engine = _alive(self.engine)
            self.outermost = None
            # This marks all buffers as changed, because only the guard has seen which ones were loaded.
            engine.finish_load()


def _alive(ref: weakref.ref[Engine]) -> Engine:
    engine = ref()
    if engine is None:
        raise RuntimeError("the engine that holds this model's values is gone; keep the model, or any module of it")
    return engine


def install_state_hooks(modules: Sequence[nn.Module], engine: Engine) -> None:
    """Make ``state_dict`` and ``load_state_dict`` of modules work with whole parameters.

    Args:
        modules: modules of the model that have parameters or buffers.
        engine: engine of the model.
    """
    saving = _Saving(engine)
    loading = _Loading(engine)
    before = saving.begin_module
    load = loading.begin_module
    loaded = loading.end_module

    # PyTorch sets an attribute on this hook, so it must be a function; a bound method has no writable attributes.
    def saved(module: nn.Module, *_: object) -> None:
        saving.end_module(module)

    for module in modules:
        engine.keep_handle(module.register_state_dict_pre_hook(before))
        engine.keep_handle(module.register_state_dict_post_hook(saved))
        engine.keep_handle(module.register_load_state_dict_pre_hook(load))
        engine.keep_handle(module.register_load_state_dict_post_hook(loaded))
    replace_in([each for each in modules if each._parameters], engine, "_save_to_state_dict", saving.save_of)


def awaited_names(parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Return the names of parameters that have no values until a checkpoint is loaded."""
    found = ((name, piece_of(parameter)) for name, parameter in parameters.items())
    return frozenset(name for name, piece in found if piece is not None and piece.awaited)


def refuse_until_loaded(model: nn.Module, engine: Engine, names: frozenset[str]) -> None:
    """Make forwards raise an error until the named parameters and all module buffers have values on all ranks.

    Args:
        model: the wrapped model.
        engine: engine of the model.
        names: names of parameters that were built without values (filled with NaN).
    """
    if not names:
        return
    awaited = _awaited[engine] = _MetaParams(engine, model, names)
    for module in model.modules():
        # The user may call any module directly, so all of them need the hook.
        awaited.handles.append(module.register_forward_pre_hook(torch.compiler.disable(awaited.before), prepend=True))
    engine.on_close(awaited.remove)


def lacks_values(engine: Engine) -> bool:
    """Return True if a parameter was built without values and this rank's shard of it has not been loaded. Local."""
    awaited = _awaited.get(engine)
    return awaited is not None and any(_missing(buffer, awaited.names) for buffer in engine.buffers)


def require_values(engine: Engine) -> None:
    """Check that all parameters have values, before they are saved. Collective.

    Args:
        engine: engine of the model.

    Raises:
        RuntimeError: parameters were built without values and have not been loaded.
    """
    awaited = _awaited.get(engine)
    if awaited is not None:
        awaited.check()


class _MetaParams:
    """Check that raises an error in forwards until the named parameters and all buffers have values on all ranks."""

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
        # Without the engine or its root module there is nothing to check.
        if engine is None or model is None:
            return
        # There are several ways to load values, so look for NaN in the values. Each rank checks its own shards.
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
        # Parameters without values were filled with NaN when the model was wrapped. A remaining NaN means not loaded.
        if name in names and row[each.offset : each.offset + each.stop - each.start].isnan().any():
            found.append(name)
    return found
