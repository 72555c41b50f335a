"""Refusals of a managed model: changes that would leave its values in zeropp's buffers behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import nn

from zeropp.engine.engine import Engine
from zeropp.params.unit import UnitState
from zeropp.partition.units import have_tensors

__all__ = ["explain_freed", "holding_tensors", "refuse_changes", "replace_in", "restorer"]


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
    moving, pickling = _refuse(_MOVING), _refuse(_PICKLING)
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
