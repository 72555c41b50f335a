"""Ownership of the engine by the model, and wrapping a model again after its optimizer or engine is gone.

[Note: ownership] Each module with parameters or buffers holds a strong reference to the engine, so trained weights live
as long as any of these modules. The optimizer also holds a strong reference, as PyTorch's optimizers do to parameters.
The engine holds only weak references to modules and to the optimizer, and parameters hold only weak references to the
engine. So there is no reference cycle, and memory and hooks are freed with the last module, without the garbage
collector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn

from zeropp._extensions import extensions
from zeropp.access.refusals import replace_in
from zeropp.access.state import gather_codes, gather_main
from zeropp.comm.hops import Comm
from zeropp.config.base import notify_once
from zeropp.engine.engine import Engine
from zeropp.engine.engine_state import EngineState
from zeropp.engine.hooks import OWNED_AS
from zeropp.engine.preconditions import NOTHING
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.guard import handler_of, is_managed, unguard, unregister
from zeropp.params.sharded_build import is_whole, piece_of, take_over

__all__ = ["PreviousWeights", "cached_whole", "former_engines", "give_to_modules", "unshard_parameters"]


def give_to_modules(modules: Sequence[nn.Module], engine: Engine) -> None:
    """Give modules of the model a strong reference to the engine, until the engine is closed."""
    # All modules with parameters or buffers get one, because the user may keep only one of them.
    replace_in(modules, engine, OWNED_AS, lambda module: engine)


def cached_whole(engine: Engine) -> dict[nn.Parameter, Tensor]:
    """Return the whole weights of all parameters if this rank caches all of them, as in stages 0 to 2. Collective.

    Args:
        engine: engine that is about to be closed.

    Returns:
        Tensors in the compute dtype, as views of the engine's memory. Empty if some weights are not cached on this
        rank, under ``torch_autocast``, or if the engine is not in a state to read them.
    """
    # Drop the gradients of a failed backward. A plain model would add them to its next gradients.
    engine.notice_failed_backward()
    if engine.closed or engine.running or EngineState.AVERAGED in engine.state or engine.agreement.lost is not None:
        return {}
    # Under autocast, some of the cached weights have 16 bits and others 32 bits, and a plain forward would fail with a
    # dtype error.
    if engine.maker.dtypes.autocast is not None:
        return {}
    # This may run as cleanup after an error. Suppress further errors, which would hide the first one.
    with contextlib.suppress(RuntimeError):
        engine.finish_load()
        engine.start_delayed_refresh()
        found = dict[nn.Parameter, Tensor]()
        for parameter in (parameter for unit in engine.units for parameter in unit.parameters):
            values = engine.cached_values(parameter)
            if values is None:
                return {}
            found[parameter] = values
        return found
    return {}


def unshard_parameters(weights: Mapping[nn.Parameter, Tensor]) -> None:
    """Turn parameters of a closed engine into plain parameters again.

    Args:
        weights: the parameters with their values, from :func:`cached_whole`.
    """
    unguard(weights)
    for parameter, values in weights.items():
        parameter.data = values
        unregister(parameter)
        for extension in extensions():
            extension.parameter_freed(parameter)


def former_engines(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Engine]:
    """Return the engines of earlier wrappings that hold values of a model; their optimizers are gone or retired. Local.

    Args:
        model: a model that may have been wrapped before.
        parameters: all parameters of the model by name.

    Raises:
        ValueError: an optimizer of the model is still in use, the values were dropped by ``close()``, or the model is
            only a part of the model that was wrapped before.
        RuntimeError: a pass is running, or values are gathered.
    """
    found: dict[int, Engine] = {}
    for name, parameter in parameters.items():
        if not is_managed(parameter) or piece_of(parameter) is not None:
            continue
        handler = handler_of(parameter)
        # Without an engine, or with a closed one, the values of the parameter are lost.
        if not isinstance(handler, Engine) or handler.closed:
            raise ValueError(
                f"parameter {name!r} was partitioned by zeropp, and its values were given up by close(); wrap a model "
                "that has its values, and let go of a ZeroOptimizer without close() to wrap its model again"
            )
        # An optimizer that still exists would go on stepping the old main weights, without effect on the new engine.
        if handler.listener is not None and not handler.retired:
            raise ValueError(
                f"parameter {name!r} is already managed by a ZeroOptimizer; give several parameter groups to one "
                "optimizer, or let go of that one first (del optimizer): the next takes the main weights over"
            )
        found[id(handler)] = handler
    modules = set(model.modules()) if found else set()
    for engine in found.values():
        engine.require_idle("wrapping the model again", needs=NOTHING)
        missing = _missing(engine, parameters.values())
        # Parameters may be missing because they were removed from the model: then its modules include the earlier root.
        # Otherwise the model is only a part of the wrapped one, and the other part would lose its weights.
        if missing and engine.root not in modules:
            raise ValueError(
                f"this model is a part of the model that was wrapped before, which also has the parameters "
                f"{missing[:10]}; wrap the whole model again"
            )
    return list(found.values())


def _missing(engine: Engine, parameters: Iterable[nn.Parameter]) -> list[str]:
    """Return the names of an engine's parameters that are not among the given ones."""
    here = {id(parameter) for parameter in parameters}
    return [n for b in engine.buffers for n, p in zip(b.names, b.parameters, strict=True) if id(p) not in here]


class PreviousWeights:
    """Source of initial values when a model is wrapped again: the main weights of its earlier engines.

    The constructor and :meth:`fill_buffer` are collective over the ranks of those engines.

    Args:
        model: model that is being wrapped.
        parameters: all parameters of the model by name.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._engines = former_engines(model, parameters)
        for engine in self._engines:
            missing = _missing(engine, parameters.values())
            if missing:
                told = f"values of {missing} are given up: they are no longer in the model"
                notify_once(told, first=engine.comm.rank == 0)
            # The comm streams will be closed, so wait for their work. Also free units that were gathered ahead.
            engine.finish_load()
            engine.release_prefetched()
            engine.wait_for_refresh()
        self._places = {id(p): (e, b, i) for e in self._engines for b in e.buffers for i, p in enumerate(b.parameters)}
        self._gathered: dict[FlatBuffer, tuple[list[Tensor], Tensor | None]] = {}

    def fill_buffer(self, buffer: FlatBuffer, comm: Comm) -> None:
        """Fill the shard of a new flat buffer with earlier main weights, and with rank 0's values of new parameters.

        Args:
            buffer: the new buffer.
            comm: the new engine's communicators.
        """
        known = [self._places.get(id(parameter)) for parameter in buffer.parameters]
        sources = dict.fromkeys((engine, source) for engine, source, _ in filter(None, known))
        # Keep gathered values only of the earlier buffers that this buffer is filled from. An earlier buffer may be a
        # source of several new ones, so they are kept between calls.
        for other in [other for other in self._gathered if all(other is not source for _, source in sources)]:
            del self._gathered[other]
        for engine, source in sources:
            if source not in self._gathered:
                self._gathered[source] = gather_main(engine, source), gather_codes(engine, source)
        # Graphs from before the wrapping refer to the old storage. A higher version makes autograd raise for them. See
        # [Note: versions].
        if sources:
            buffer.version = 1 + max(source.version for _, source in sources)
        buffer.shard_from(self._filler(buffer, comm))
        # Overwrite the codes that shard_from made: encoding decoded values again would change some of them.
        if isinstance(buffer, CodedBuffer):
            for _, source in sources:
                codes = self._gathered[source][1]
                if codes is not None:
                    buffer.adopt_codes(source, codes)

    def _filler(self, buffer: FlatBuffer, comm: Comm) -> Callable[[Tensor], None]:
        places = [self._places.get(id(parameter)) for parameter in buffer.parameters]
        values = [None if place is None else self._gathered[place[1]][0][place[2]] for place in places]

        def fill(whole: Tensor) -> None:
            views = buffer.layout.views(whole)
            # Broadcast new parameters from rank 0. Gathered values of earlier buffers are equal on all ranks already,
            # and take_over gathers parameters that zero.Init has sharded.
            fresh = [v is None and is_whole(p) for v, p in zip(values, buffer.parameters, strict=True)]
            if any(fresh):
                for view, parameter, new in zip(views, buffer.parameters, fresh, strict=True):
                    if new and comm.rank == 0:
                        view.copy_(parameter)
                comm.broadcast(whole)
            for view, value in zip(views, values, strict=True):
                if value is not None:
                    view.copy_(value)
            take_over(buffer.parameters, views)

        return fill

    def close(self) -> None:
        """Close the earlier engines."""
        self._gathered.clear()
        for engine in self._engines:
            engine.close()
