"""Refusals: changes to a wrapped model that would leave its values in zeropp's buffers behind.

``model.to()``, ``half()``, ``share_memory()`` and the like are refused when they are called. Modules and parameters
that were added, removed or replaced since the model was wrapped are found at the next forward. Compiled modules are
refused if they would replay CUDA graphs, whose weights have moved since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeropp._compat import replays_cuda_graphs
from zeropp.engine.engine import Engine
from zeropp.params.guard import handler_of, is_managed
from zeropp.params.unit import UnitState
from zeropp.partition.units import have_tensors

__all__ = [
    "check_structure",
    "explain_freed",
    "holding_tensors",
    "refuse_changes",
    "refuse_cuda_graphs",
    "replace_in",
    "restorer",
    "watch_structure",
]


_MOVING = (
    "a model managed by zeropp cannot be moved or cast (.to, .cuda, .cpu, .half, .bfloat16, .float, .double): its "
    "values lie in buffers of zeropp. Move and cast it before wrapping; for another compute dtype set "
    '{"bf16": {"enabled": true}}'
)
_PICKLING = (
    "a model managed by zeropp cannot be pickled or deep-copied (as by torch's AveragedModel): its values lie in "
    "buffers of zeropp, and this rank may have only a part of them. Save zeropp.full_state(model) or "
    "model.state_dict() instead, both collective; for an average of the weights use zeropp.ema(model, decay), for a "
    "copy build another model and load full_state into it"
)


def _refuse(message: str) -> Callable[..., object]:
    def refuse(*args: object, **kwargs: object) -> object:
        raise RuntimeError(message)

    return refuse


def refuse_changes(model: nn.Module, modules: Sequence[nn.Module], engine: Engine) -> None:
    """Replace, on these module objects only, what would move, cast or pickle parameters; and route ``zero_grad``.

    Args:
        model: the root.
        modules: of it, from :func:`holding_tensors`.
        engine: of the model.
    """
    # An attribute of the object hides the method: .to() and its kin all come to _apply, and pickle and copy ask the
    # object for __reduce_ex__. Classes stay as they are.
    moving = _refuse(_MOVING)
    pickling = _refuse(_PICKLING)
    replace_in(modules, engine, "_apply", lambda module: moving)
    replace_in(modules, engine, "__reduce_ex__", lambda module: pickling)
    # Weakly: modules own the engine by one attribute alone. See [Note: ownership].
    ref = weakref.ref(engine)

    def zero_grad(set_to_none: bool = True) -> None:
        target = ref()
        if target is not None:
            target.zero_grad(set_to_none=set_to_none)

    # torch's own would find no gradients: those of released parameters are in shards.
    model.__dict__["zero_grad"] = zero_grad
    engine.on_close(restorer(model, "zero_grad"))


def holding_tensors(model: nn.Module) -> list[nn.Module]:
    """The modules that have parameters or buffers, or have one below them that has.

    Metrics and the like have none: nothing of theirs is partitioned, and libraries move and copy them.
    """
    modules = list(model.modules())
    return [
        each for each, found in zip(modules, have_tensors(modules, ("_parameters", "_buffers")), strict=True) if found
    ]


def replace_in(modules: Sequence[nn.Module], engine: Engine, name: str, value: Callable[[nn.Module], object]) -> None:
    """Give each of these module objects an attribute, past ``__setattr__``, until the engine is closed."""
    for module in modules:
        module.__dict__[name] = value(module)
    # One action for all of them. The engine keeps it, and must not keep modules.
    refs = [weakref.ref(module) for module in modules]

    def restore() -> None:
        for ref in refs:
            target = ref()
            if target is not None:
                target.__dict__.pop(name, None)

    engine.on_close(restore)


def restorer(module: nn.Module, name: str, before: object = None) -> Callable[[], None]:
    """Takes an attribute of a module object away again, or puts back what was there, if the module is."""
    # The engine keeps these actions, and must not keep modules.
    ref = weakref.ref(module)

    def restore() -> None:
        target = ref()
        if target is not None and before is not None:
            target.__dict__[name] = before
        elif target is not None:
            target.__dict__.pop(name, None)

    return restore


def explain_freed(engine: Engine, message: str) -> str:
    """Autograd's complaint about a saved weight that is not there, with the parameters it may be about."""
    # torch's message has version numbers and no names: units that are away now are what it may be about. See
    # [Note: versions].
    away = [unit for unit in engine.units if unit.state is UnitState.SHARDED]
    names = [name for unit in away for buffer in unit.buffers for name in buffer.names]
    if not names:
        return (
            "backward reached a weight that has changed since forward: between this graph's forward and its backward a "
            "step was taken, or a parameter of its unit edited or unfrozen. Call backward before, or forward anew. "
            f"Backward through gradients (create_graph=True) is not supported either. torch says: {message}"
        )
    return (
        f"backward reached a weight whose unit was released, or that has changed since forward: one of {names[:20]}"
        f"{'...' if names[20:] else ''}. It was used outside its module's forward, or its module's outputs are "
        "hidden in an object that zeropp cannot look into; return them as tensors, or make the enclosing module a "
        f"leaf with zero_optimization.leaf_module. torch says: {message}"
    )


def refuse_cuda_graphs(model: nn.Module, device: torch.device, moves: Callable[[nn.Parameter], bool]) -> None:
    """Refuse modules that are compiled to CUDA graphs and use weights that every gather brings to another address.

    torch takes parameters to stay where they are, and records a graph anew when one has moved: at each pass, until it
    gives up and runs without.

    Args:
        model: with such modules, perhaps.
        device: it runs on; elsewhere than on a card these modes do nothing.
        moves: whether a parameter is gathered at each use.

    Raises:
        ValueError: which modules they are, and what to do.
    """
    if device.type != "cuda":
        return
    found = [
        path
        for path, module in model.named_modules()
        if replays_cuda_graphs(module) and any(map(moves, module.parameters()))
    ]
    if found:
        raise ValueError(
            f"modules {found[:5]}{'...' if found[5:] else ''} are compiled to CUDA graphs, which want weights to stay "
            "at one address, and stage 3 gathers theirs at another each time. Compile them with "
            'torch.compile(module) or mode="max-autotune-no-cudagraphs"; or let weights stay whole, in stage 1 or 2, '
            "or by stage3_param_persistence_threshold"
        )


_CHECK = "_zeropp_structure"  # in the __dict__ of a wrapped model

# Unbound, so that map runs it without a frame of Python for each table.
_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


class _Structure:
    """The tree of modules as it was; it holds modules below the root, so only the root may hold it."""

    def __init__(self, model: nn.Module) -> None:
        # Known ones that nobody partitions. Held, or ids might be used again.
        self._apart: dict[int, nn.Parameter] = {}
        self.note_structure(model)

    def note_structure(self, model: nn.Module) -> None:
        """This is how it is to be from now on."""
        # The dicts themselves: modules replace what is in them, not the dicts.
        tables = [table for module in model.modules() for table in (module._modules, module._parameters)]
        self._tables: list[dict[str, Any]] = tables
        # Held for the same reason.
        self._entries = list(chain.from_iterable(map(_values, self._tables)))
        self._ids = list(map(id, self._entries))
        self._own = {id(module): set(map(id, module._parameters.values())) for module in model.modules()}
        self._apart |= {id(parameter): parameter for parameter in model.parameters() if not is_managed(parameter)}

    def has_changed(self) -> bool:
        """Looks at identities alone, in loops of the interpreter's own: this runs before every forward."""
        return list(map(id, chain.from_iterable(map(_values, self._tables)))) != self._ids

    def tied_in(self, model: nn.Module, engine: Engine) -> list[str]:
        """Names of parameters of the engine that stand in a module where they were not before."""
        found = []
        for path, module in model.named_modules():
            own = self._own.get(id(module), set())
            here = [(name, p) for name, p in module._parameters.items() if p is not None and id(p) not in own]
            moved = [name for name, parameter in here if handler_of(parameter) is engine]
            found += [f"{path}.{name}" if path else name for name in moved]
        return found

    def new_in(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Parameters that nobody partitioned, by name."""
        return {n: p for n, p in model.named_parameters() if id(p) not in self._apart and not is_managed(p)}


def _moves(engine: Engine, parameter: nn.Parameter) -> bool:
    return any(parameter is p for u in engine.units if not u.persistent for b in u.buffers for p in b.parameters)


def watch_structure(model: nn.Module, engine: Engine) -> None:
    """Let every forward of the model from outside refuse parameters that came after it was wrapped.

    Modules without parameters may come and go, as some make theirs when they first run; and what is taken out stays
    managed and unused.
    """
    structure = _Structure(model)
    ref = weakref.ref(engine)

    def check(module: nn.Module, args: object) -> None:
        engine = ref()
        if engine is None:
            return
        engine.notice_failed_backward()
        # A pass that has begun is not refused half-way.
        if engine.running or not structure.has_changed():
            return
        new = structure.new_in(module)
        if new:
            raise _of_new_parameters(new)
        tied = structure.tied_in(module, engine)
        if tied:
            raise RuntimeError(
                f"parameters {tied} were tied to others after the model was wrapped: backward would not know where "
                "they are used. Tie them before wrapping; or let go of the optimizer (del optimizer) and wrap again"
            )
        refuse_cuda_graphs(module, engine.device, partial(_moves, engine))
        # What brings no parameters is accepted, once: the next forward compares with this.
        structure.note_structure(module)

    # On the root alone, as the hook: see the class above.
    model.__dict__[_CHECK] = check
    engine.on_close(restorer(model, _CHECK))
    # Prepended after all others, so that it runs first: a pass that is refused has not begun.
    engine.keep_handle(model.register_forward_pre_hook(torch.compiler.disable(check), prepend=True))


def _of_new_parameters(new: dict[str, torch.Tensor]) -> RuntimeError:
    names = f"{[*new][:10]}{'...' if len(new) > 10 else ''}"
    # A module takes parameters alone by itself.
    if any(not isinstance(tensor, nn.Parameter) for tensor in new.values()):
        return RuntimeError(
            f"the model was called with other tensors in the place of its parameters {names}, as by "
            "torch.func.functional_call, alone or inside vmap, grad and other transforms of torch.func. The weights of "
            "this model are gathered and their gradients reduced in hooks, in which such tensors have no part. For "
            "gradients of each sample call backward for one sample after the other; or transform a model that is not "
            "wrapped, which has loaded zeropp.full_state(model)"
        )
    return RuntimeError(
        f"parameters {names} came after the model was wrapped, by themselves or with a module put in another's place: "
        "nothing would partition, reduce or step them. Wrap the finished model; to change a wrapped one let go of its "
        "optimizer (del optimizer), change it and wrap it again, which takes the trained weights over"
    )


def check_structure(model: nn.Module) -> None:
    """Refuse of a wrapped model what its forward would refuse; for passes that do not call that forward."""
    model.__dict__[_CHECK](model, ())
