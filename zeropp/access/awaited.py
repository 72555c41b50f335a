"""Weights of a model that was wrapped without values: they must have been loaded before the first forward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeropp.engine.engine import Engine
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.piece import piece_of

__all__ = ["await_values", "awaited_names", "lacks_values", "require_values"]


def awaited_names(parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Parameters that have no values until they are loaded."""
    found = ((name, piece_of(parameter)) for name, parameter in parameters.items())
    return frozenset(name for name, piece in found if piece is not None and piece.awaited)


def await_values(model: nn.Module, engine: Engine, names: frozenset[str]) -> None:
    """Refuse forwards of the model, and of modules of it, until all parameters of these names have values everywhere.

    Buffers, too, which have NaN until they are loaded.
    """
    if not names:
        return
    awaited = _awaited[engine] = _Awaited(engine, model, names)
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


class _Awaited:
    def __init__(self, engine: Engine, model: nn.Module, names: frozenset[str]) -> None:
        self._engine, self._root, self.names = weakref.ref(engine), weakref.ref(model), names
        self.handles: list[RemovableHandle] = []

    def before(self, module: nn.Module, args: object) -> None:
        engine = self._engine()
        if engine is not None and not engine.running:
            self.check()

    def check(self) -> None:
        engine, model = self._engine(), self._root()
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


_awaited: weakref.WeakKeyDictionary[Engine, _Awaited] = weakref.WeakKeyDictionary()


def _missing(buffer: FlatBuffer, names: frozenset[str]) -> list[str]:
    row = buffer.decoded() if isinstance(buffer, CodedBuffer) else buffer.shard
    found = []
    for each in buffer.fragments():
        name = buffer.names[each.slot]
        # Parameters without values were filled with NaN when the model was built; NaN that is left was never loaded.
        if name in names and row[each.offset : each.offset + each.stop - each.start].isnan().any():
            found.append(name)
    return found
