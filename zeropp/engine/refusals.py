"""What a managed model refuses: changes that would leave its partitioned values behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import nn

from zeropp.engine.engine import Engine

__all__ = ["refuse_changes"]


_MOVING = (
    "a model managed by zeropp cannot be moved or cast (.to, .cuda, .cpu, .half, .bfloat16, .float, .double): its "
    "values live in partitions. Move and cast it before wrapping; for another compute dtype set "
    '{"bf16": {"enabled": true}}'
)
_PICKLING = (
    "a model managed by zeropp cannot be pickled or deep-copied: this rank holds only a part of it. Save "
    "zeropp.full_state(model) or model.state_dict() instead, both collective"
)


def _refuse(message: str) -> Callable[..., object]:
    def refuse(*args: object, **kwargs: object) -> object:
        raise RuntimeError(message)

    return refuse


def refuse_changes(model: nn.Module, engine: Engine) -> None:
    """Replace, on these module objects only, what would move, cast or pickle parameters; and route ``zero_grad``."""
    for module in model.modules():
        for name, message in (("_apply", _MOVING), ("__reduce_ex__", _PICKLING)):
            module.__dict__[name] = _refuse(message)
            engine.on_close(_restorer(module, name))
    ref = weakref.ref(engine)

    def zero_grad(set_to_none: bool = True) -> None:
        target = ref()
        if target is not None:
            target.zero_grad()

    model.__dict__["zero_grad"] = zero_grad
    engine.on_close(_restorer(model, "zero_grad"))


def _restorer(module: nn.Module, name: str) -> Callable[[], None]:
    ref = weakref.ref(module)

    def restore() -> None:
        target = ref()
        if target is not None:
            target.__dict__.pop(name, None)

    return restore
