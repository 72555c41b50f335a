"""Ownership of the engine by the model, and a second wrapping of a model whose optimizer or engine is gone.

[Note: ownership] The model's modules own its engine, so trained weights live as long as any of them. The engine knows
modules and the optimizer weakly, and parameters know the engine weakly: no cycle, so that memory and hooks go with the
last module, without the garbage collector. The optimizer owns the engine, too, as torch's own parameters.
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
from zeropp.params.guard import handler_of, is_managed, unguard, unregister
from zeropp.params.sharded_build import is_whole, piece_of, take_over
from zeropp.params.unit import FlatBuffer

__all__ = ["PreviousWeights", "cached_whole", "former_engines", "give_to_modules", "unshard_parameters"]


def give_to_modules(modules: Sequence[nn.Module], engine: Engine) -> None:
    """Let these modules of the model own the engine, until that is closed."""
    # Every module that has values: any of them may be all that the user keeps.
    replace_in(modules, engine, OWNED_AS, lambda module: engine)


def cached_whole(engine: Engine) -> dict[nn.Parameter, Tensor]:
    """Every parameter's weights where this rank has all of them, as in stages 0 to 2; none otherwise. Collective.

    In the dtype that the model computes with, and in the engine's own memory, which lives as long as they do.
    """
    # An engine forgets a backward that has failed, with the gradients that it has brought, which a plain model would
    # add to its next ones.
    engine.notice_failed_backward()
    if engine.closed or engine.running or EngineState.AVERAGED in engine.state or engine.agreement.lost is not None:
        return {}
    # Some of these weights are rounded, and some not: what a plain forward does with them ends in an error.
    if engine.maker.dtypes.autocast is not None:
        return {}
    # What comes now is cleaning up, after an error perhaps: another one would hide it.
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
    """Make plain parameters of those of an engine that is closed."""
    unguard(weights)
    for parameter, values in weights.items():
        parameter.data = values
        unregister(parameter)
        for extension in extensions():
            extension.parameter_freed(parameter)


def former_engines(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Engine]:
    """Engines that hold values of a model, and whose optimizers are gone. Local.

    Args:
        model: perhaps wrapped before.
        parameters: all of its, by name.

    Raises:
        ValueError: an optimizer is still there, values were given up, or a former model was larger than this one.
        RuntimeError: a pass is running, or values are gathered.
    """
    found: dict[int, Engine] = {}
    for name, parameter in parameters.items():
        if not is_managed(parameter) or piece_of(parameter) is not None:
            continue
        handler = handler_of(parameter)
        # Without a handler, or with one that was closed, nothing holds its values any more.
        if not isinstance(handler, Engine) or handler.closed:
            raise ValueError(
                f"parameter {name!r} was partitioned by zeropp, and its values were given up by close(); wrap a model "
                "that has its values, and let go of a ZeroOptimizer without close() to wrap its model again"
            )
        # An optimizer that lives would go on stepping former main weights, and the new engine not know of it.
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
        # With the former root among these modules, what is missing was taken out of the model; without it, this is a
        # part of what was wrapped, and the rest would lose its weights.
        if missing and engine.root not in modules:
            raise ValueError(
                f"parameters {missing[:10]} were wrapped together with those given now, and are not among them; wrap "
                "the whole model again"
            )
    return list(found.values())


def _missing(engine: Engine, parameters: Iterable[nn.Parameter]) -> list[str]:
    """Parameters that are no longer in the model, which has these."""
    here = {id(parameter) for parameter in parameters}
    return [n for b in engine.buffers for n, p in zip(b.names, b.parameters, strict=True) if id(p) not in here]


class PreviousWeights:
    """Main weights of engines whose optimizers are gone, one flat buffer at a time. Collective over their ranks."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._engines = former_engines(model, parameters)
        for engine in self._engines:
            missing = _missing(engine, parameters.values())
            if missing:
                told = f"values of {missing} are given up: they are no longer in the model"
                notify_once(told, first=engine.comm.rank == 0)
            # Nothing may be under way on comm streams that are about to be closed, and no memory be kept for a pass to
            # come.
            engine.finish_load()
            engine.release_prefetched()
            engine.wait_for_refresh()
        self._places = {id(p): (e, b, i) for e in self._engines for b in e.buffers for i, p in enumerate(b.parameters)}
        self._gathered: dict[FlatBuffer, tuple[list[Tensor], Tensor | None]] = {}

    def fill_buffer(self, buffer: FlatBuffer, comm: Comm) -> None:
        """Let a new buffer have what there is of its parameters; rank 0's values of those that are new, too."""
        known = [self._places.get(id(parameter)) for parameter in buffer.parameters]
        sources = dict.fromkeys((engine, source) for engine, source, _ in filter(None, known))
        # Whole values of a few buffers at a time: those that the next one is made of, and no more. A former buffer may
        # go to several.
        for other in [other for other in self._gathered if all(other is not source for _, source in sources)]:
            del self._gathered[other]
        for engine, source in sources:
            if source not in self._gathered:
                self._gathered[source] = gather_main(engine, source), gather_codes(engine, source)
        # Graphs made before know the old storage. See [Note: versions].
        if sources:
            buffer.version = 1 + max(source.version for _, source in sources)
        buffer.shard_from(self._filler(buffer, comm))
        # Over what shard_from has encoded: to encode decoded values again changes some of them.
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
            # New parameters are on rank 0 as the user made them; what was gathered is the same on every rank already,
            # and what was built in pieces is gathered now.
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
        """The former engines are done with."""
        self._gathered.clear()
        for engine in self._engines:
            engine.close()
