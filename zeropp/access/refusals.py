"""Errors for changes of a wrapped model that zeropp cannot support, because the values are in zeropp's flat buffers.

``model.to()``, ``half()``, ``share_memory()`` and similar methods raise an error when they are called. New, replaced or
newly tied parameters raise an error at the next forward. Modules that are compiled to CUDA graphs raise an error if
their weights change addresses between gathers.
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
    """Make methods that move, cast or pickle parameters raise errors, and redirect ``model.zero_grad`` to the engine.

    This affects only the given module objects and ends when the engine is closed.

    Args:
        model: the wrapped model.
        modules: modules of the model, from :func:`holding_tensors`.
        engine: engine of the model.
    """
    # An instance attribute hides the method of the class. .to() and similar methods all call _apply; pickle and copy
    # call __reduce_ex__. So replacing these two on the objects is enough, and classes stay unchanged.
    moving = _refuse(_MOVING)
    pickling = _refuse(_PICKLING)
    replace_in(modules, engine, "_apply", lambda module: moving)
    replace_in(modules, engine, "__reduce_ex__", lambda module: pickling)
    # Use a weak reference here: modules hold the engine by one attribute only. See [Note: ownership].
    ref = weakref.ref(engine)

    def zero_grad(set_to_none: bool = True) -> None:
        target = ref()
        if target is not None:
            target.zero_grad(set_to_none=set_to_none)

    # The gradients of sharded parameters are in gradient shards, where PyTorch's zero_grad would not find them.
    model.__dict__["zero_grad"] = zero_grad
    engine.on_close(restorer(model, "zero_grad"))


def holding_tensors(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have parameters or buffers, directly or in a submodule.

    Other modules, such as metrics, may be moved and copied freely, because they hold no values.
    """
    modules = list(model.modules())
    return [
        each for each, found in zip(modules, have_tensors(modules, ("_parameters", "_buffers")), strict=True) if found
    ]


def replace_in(modules: Sequence[nn.Module], engine: Engine, name: str, value: Callable[[nn.Module], object]) -> None:
    """Set an attribute of each given module object, without ``__setattr__``, until the engine is closed.

    Args:
        modules: the module objects.
        engine: engine whose closing removes the attribute.
        name: name of the attribute.
        value: function that returns the attribute's value for a module.
    """
    for module in modules:
        module.__dict__[name] = value(module)
    # The engine stores the restore function, so the function must hold modules weakly. See [Note: ownership].
    refs = [weakref.ref(module) for module in modules]

    def restore() -> None:
        for ref in refs:
            target = ref()
            if target is not None:
                target.__dict__.pop(name, None)

    engine.on_close(restore)


def restorer(module: nn.Module, name: str, before: object = None) -> Callable[[], None]:
    """Return a function that restores an attribute of a module object, if the module still exists.

    Args:
        module: the module.
        name: name of the attribute.
        before: earlier value of the attribute; None to remove the attribute.
    """
    # The engine stores the returned function, so the function must hold the module weakly. See [Note: ownership].
    ref = weakref.ref(module)

    def restore() -> None:
        target = ref()
        if target is not None and before is not None:
            target.__dict__[name] = before
        elif target is not None:
            target.__dict__.pop(name, None)

    return restore


def explain_freed(engine: Engine, message: str) -> str:
    """Return an error message for autograd's error about a saved weight that was freed or changed.

    Args:
        engine: engine of the model.
        message: PyTorch's message.
    """
    # PyTorch's message gives version numbers but no names. So name the parameters of the units that are sharded now: a
    # freed weight must be one of them. See [Note: versions].
    away = [unit for unit in engine.units if unit.state is UnitState.SHARDED]
    names = [name for unit in away for buffer in unit.buffers for name in buffer.names]
    if not names:
        return (
            "backward reached a weight that has changed since forward: between this graph's forward and its backward a "
            "step was taken, or a parameter of its unit was edited or unfrozen. Call backward before that change, or "
            "run forward again after it. "
            f"Backward through gradients (create_graph=True) is not supported either. torch says: {message}"
        )
    return (
        f"backward reached a weight whose unit was released, or that has changed since forward: one of {names[:20]}"
        f"{'...' if names[20:] else ''}. The weight was used outside its module's forward, or its module's outputs are "
        "hidden in an object that zeropp cannot look into. Return them as tensors, or make the enclosing module a "
        f"leaf with zero_optimization.leaf_module. torch says: {message}"
    )


def refuse_cuda_graphs(model: nn.Module, device: torch.device, moves: Callable[[nn.Parameter], bool]) -> None:
    """Raise an error for modules that are compiled to CUDA graphs and whose weights change addresses.

    Each gather may place weights at another address. PyTorch then records the CUDA graph again in each pass, until it
    gives up and runs without CUDA graphs.

    Args:
        model: the model.
        device: device of the model. Only CUDA devices are checked.
        moves: function that returns True if a parameter is gathered anew at each use.

    Raises:
        ValueError: such modules exist. The message names them and the remedies.
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
            f"modules {found[:5]}{'...' if found[5:] else ''} are compiled to CUDA graphs, which need weights to stay "
            "at one address, but stage 3 gathers their weights at another address each time. Compile them with "
            'torch.compile(module) or mode="max-autotune-no-cudagraphs"; or keep the weights whole, with stage 1 or 2, '
            "or with stage3_param_persistence_threshold"
        )


_CHECK = "_zeropp_structure"  # key in the __dict__ of a wrapped model for its structure check

# The unbound method, so that map() calls it without a Python frame per dict.
_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


class _Structure:
    """Snapshot of a model's modules and parameters.

    The snapshot holds references to submodules. So only the root module may hold the snapshot, or it would keep the
    submodules alive.
    """

    def __init__(self, model: nn.Module) -> None:
        # Known parameters that zeropp does not manage. Keep references, so that their ids are not reused.
        self._apart: dict[int, nn.Parameter] = {}
        self.note_structure(model)

    def note_structure(self, model: nn.Module) -> None:
        """Take a snapshot of the current structure, which later calls of :meth:`has_changed` compare with."""
        # Keep the dicts of submodules and parameters. Modules change the contents of these dicts, not the dicts.
        tables = [table for module in model.modules() for table in (module._modules, module._parameters)]
        self._tables: list[dict[str, Any]] = tables
        # Keep references to the entries, too, so that their ids are not reused.
        self._entries = list(chain.from_iterable(map(_values, self._tables)))
        self._ids = list(map(id, self._entries))
        self._own = {id(module): set(map(id, module._parameters.values())) for module in model.modules()}
        self._apart |= {id(parameter): parameter for parameter in model.parameters() if not is_managed(parameter)}

    def has_changed(self) -> bool:
        """Return True if a submodule or parameter was added, removed or replaced since the snapshot.

        This runs before every forward, so it compares ids only, with loops in C.
        """
        return list(map(id, chain.from_iterable(map(_values, self._tables)))) != self._ids

    def tied_in(self, model: nn.Module, engine: Engine) -> list[str]:
        """Return names of parameters of the engine that were tied to further modules since the snapshot."""
        found = []
        for path, module in model.named_modules():
            own = self._own.get(id(module), set())
            here = [(name, p) for name, p in module._parameters.items() if p is not None and id(p) not in own]
            moved = [name for name, parameter in here if handler_of(parameter) is engine]
            found += [f"{path}.{name}" if path else name for name in moved]
        return found

    def new_in(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return new parameters that zeropp does not manage, by name."""
        return {n: p for n, p in model.named_parameters() if id(p) not in self._apart and not is_managed(p)}


def _moves(engine: Engine, parameter: nn.Parameter) -> bool:
    return any(parameter is p for u in engine.units if not u.persistent for b in u.buffers for p in b.parameters)


def watch_structure(model: nn.Module, engine: Engine) -> None:
    """Install a check that raises an error in the model's forward if parameters were added or tied after wrapping.

    Modules without parameters may be added and removed; some models create such modules in their first forward.
    Parameters that were removed from the model stay managed and are not used.

    Args:
        model: the wrapped model.
        engine: engine of the model.
    """
    structure = _Structure(model)
    ref = weakref.ref(engine)

    def check(module: nn.Module, args: object) -> None:
        engine = ref()
        if engine is None:
            return
        engine.notice_failed_backward()
        # Check only at the start of a pass. An error in a nested call would interrupt a running pass.
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
        # A change without new parameters is accepted. The next forward compares with the new structure.
        structure.note_structure(module)

    # Store the check on the root module only, because it holds the snapshot. See _Structure.
    model.__dict__[_CHECK] = check
    engine.on_close(restorer(model, _CHECK))
    # This hook is prepended last, so it runs before all others, and a rejected pass has not started.
    engine.keep_handle(model.register_forward_pre_hook(torch.compiler.disable(check), prepend=True))


def _of_new_parameters(new: dict[str, torch.Tensor]) -> RuntimeError:
    names = f"{[*new][:10]}{'...' if len(new) > 10 else ''}"
    # nn.Module accepts only parameters in its table of parameters. Other tensors come from torch.func.
    if any(not isinstance(tensor, nn.Parameter) for tensor in new.values()):
        return RuntimeError(
            f"the model was called with other tensors in the place of its parameters {names}, as by "
            "torch.func.functional_call, alone or inside vmap, grad and other transforms of torch.func. The hooks that "
            "gather weights and reduce gradients do not work with such tensors. For per-sample gradients call backward "
            "for one sample after the other, or transform a model that is not wrapped and has loaded "
            "zeropp.full_state(model)"
        )
    return RuntimeError(
        f"parameters {names} were added after the model was wrapped, directly or with a new module, so zeropp does not "
        "shard, reduce or step them. Wrap the finished model. To change a wrapped model, delete its optimizer "
        "(del optimizer), change the model and wrap it again; the trained weights are kept"
    )


def check_structure(model: nn.Module) -> None:
    """Run the structure check of a wrapped model, for passes that do not call the model's forward.

    Raises:
        RuntimeError: parameters were added or tied after wrapping.
    """
    model.__dict__[_CHECK](model, ())
