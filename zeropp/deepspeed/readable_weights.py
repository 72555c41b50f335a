"""Read access between passes to weights that every rank holds in full: stages 0 to 2, and small parameters of stage 3.

DeepSpeed allows this, so its scripts rely on it. Edits are refused, except of weights that no step changes and that
every rank holds in full: frozen ones, and those of a model that nobody trains, such as an average of another model's
weights. These are edited as in plain torch, each rank its own.

[Note: edits of frozen weights] Frozen weights may be edited, too, where every rank has them whole: nothing else writes
to them. An edit changes what this rank computes with, and its part of the main weights. So all ranks have to make it,
or main weights would be of both kinds. Each rank keeps a number that follows from its edits. Collective calls that read
or save weights compare it, in the exchange that they begin with, and a step does by the hash of what was issued; a rank
alone that merges an adapter, to save it from there, meets neither.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zeropp._compat import storage_id, unguarded
from zeropp.access.state import cached_values
from zeropp.engine.engine import Engine

__all__ = ["ReadableWeights"]


# Those whose names do not end as those of other functions in place.
_WRITING = {
    "__setitem__", "__set__", "__delete__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_UNTRACKED = (torch.Tensor.data.__get__, torch.Tensor.detach)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Edits:
    """The place that edits go to: rows of the same elements in one order.

    Attributes:
        cached: that is shown, [n].
        main: this rank's part of the weights that it was made of, [m]; the same memory where that is possible.
        start: of that part in ``cached``.
        note: told of each edit, by the first element and the one behind the last.
    """

    cached: Tensor
    main: Tensor
    start: int = 0
    note: Callable[[int, int], None] = field(default=lambda begin, end: None)

    def take_edit(self, written: Tensor) -> None:
        """A view of what is cached has been written to."""
        if not written.numel():
            return
        begin = int(written.storage_offset() - self.cached.storage_offset())
        extent = sum((size - 1) * stride for size, stride in zip(written.shape, written.stride(), strict=True))
        end = begin + int(extent) + 1
        self.note(begin, end)
        first = max(begin, self.start)
        last = min(end, self.start + self.main.numel())
        if first < last and self.main.untyped_storage().data_ptr() != self.cached.untyped_storage().data_ptr():
            main, cached = self.main[first - self.start : last - self.start], self.cached[first:last]
            # What has not been edited keeps the bits that the cached weight was rounded from.
            main.copy_(torch.where(main.to(cached.dtype) == cached, main, cached.to(main.dtype)))


class ShownWeights(torch.Tensor):
    """A view of weights that every rank caches. Its views are such, too; what is computed of it is a plain tensor."""

    edits: Edits | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return show(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain copy, whose memory is its own."""
        copied = self.clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain tensor: a file that names this class could not be read without zeropp."""
        with unguarded():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _LookedAt(torch.autograd.Function):
    """The weights; a backward that comes to them has no way on."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> NoReturn:
        raise RuntimeError(
            "backward came to weights that were looked at between passes, and no gradient of these would be reduced; "
            "compute a penalty on weights inside the model's forward, or take them by .detach() to read them alone"
        )


def is_read(func: Callable[..., Any]) -> bool:
    """Tell whether a function of a released parameter, as ``__torch_function__`` is given it, does not write to it."""
    return not _writes(func)


def shown(values: Tensor, func: Callable[..., Any], trained: bool, edits: Edits | None = None) -> ShownWeights:
    """Whole values in the place of a released parameter.

    Args:
        values: cached ones.
        func: of them.
        trained: whether the parameter requires grad.
        edits: where edits of them go; None to refuse them.
    """
    if trained and torch.is_grad_enabled() and func not in _UNTRACKED:
        # Scripts log norms without no_grad(). A graph may begin here; what must not be is that it ends in silence.
        values = _LookedAt.apply(values.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return _shown_as(values, edits)


def _shown_as(values: Tensor, edits: Edits | None) -> ShownWeights:
    found = values.as_subclass(ShownWeights)
    found.edits = edits
    return found


def show(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of shown weights.

    Raises:
        RuntimeError: it would write to them.
    """
    written = [*args[:1], kwargs.get("self"), kwargs.get("input")] if _writes(func) else []
    involved = list(_shown((args, list(kwargs.values()))))
    edited = list(_shown([*written, kwargs.get("out")]))
    if any(each.edits is None for each in edited):
        name = getattr(func, "__name__", str(func))
        raise RuntimeError(
            f"{name} on weights that are shown to be read: the edit would reach neither the main weights nor other "
            "ranks. Edit them in zeropp.zero.GatheredParameters(parameters, modifier_rank=0), or in a copy, .clone()"
        )
    # All of it: to ask shown weights for their storage is a function of theirs, too.
    with unguarded():
        result = func(*args, **kwargs)
        for each in edited:
            assert each.edits is not None  # asked above
            with torch.no_grad():
                each.edits.take_edit(each)
        return _marked(result, {storage_id(each): each.edits for each in involved})


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def _shown(values: object) -> Iterable[ShownWeights]:
    if isinstance(values, ShownWeights):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _shown(each)


def _marked(result: Any, places: dict[int, Edits | None]) -> Any:
    """The result, with views of the weights among it shown as they are."""
    if isinstance(result, Tensor):
        # Also what an operation hands through as it is, as contiguous() does.
        return _shown_as(result, places[storage_id(result)]) if storage_id(result) in places else result
    if isinstance(result, list | tuple) and not hasattr(result, "_fields"):
        return type(result)(_marked(each, places) for each in result)
    return result


_EDIT = 5  # a kind in the hash of what is issued, beside those of collectives


class ReadableWeights:
    """Finds them: in stages 0 to 2, and of small parameters in stage 3. Reading them takes no other rank.

    Args:
        engine: whose parameters are asked for.

    Attributes:
        alone: ``state_dict()`` takes no other rank, whatever is not here; of a stand-in's scripts.
    """

    alone = False

    def __init__(self, engine: Engine) -> None:
        # The engine has this, and has to go with its model.
        self._engine = weakref.ref(engine)

    def has(self, parameter: nn.Parameter) -> bool:
        """Tell whether a parameter's values are here, or are nobody's to gather."""
        engine = self._engine()
        return engine is None or id(parameter) not in engine.unit_of or self(parameter) is not None

    def __call__(self, parameter: nn.Parameter) -> Tensor | None:
        """Whole values in the dtype that the model computes in; None where they are not there, or not the newest."""
        engine = self._engine()
        return None if engine is None else cached_values(engine, parameter)

    def values_for(self, func: Callable[..., Any], parameter: nn.Parameter) -> Tensor | None:
        """Values that take the place of a released parameter in a call of ``func``; None if the call is refused."""
        edits = self.edits(parameter)
        values = self(parameter) if edits is not None or is_read(func) else None
        return None if values is None else shown(values, func, parameter.requires_grad, edits)

    def call(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[int, Tensor]
    ) -> Any:
        """Call a function of released parameters with their values, as :meth:`values_for` gave them, by ids."""
        if func == _SET_DATA:
            return _set_values(values[id(args[0])], args[1])
        return show(func, _replaced(args, values), _replaced(kwargs, values))

    def edits(self, parameter: nn.Parameter) -> Edits | None:
        """The places that edits of a frozen weight go to (PEFT's ``merge_and_unload()``), in stages 0 to 2; else None.

        An edit is this rank's own, and is meant to be made on every rank: see [Note: edits of frozen weights].
        """
        engine = self._engine()
        # By the stage, so that it is on one rank as on many. A step would write over edits of what is trained.
        if engine is None or not engine.mode.stays_whole:
            return None
        unit = engine.unit_of[id(parameter)]
        buffer, _ = unit.place_of(parameter)
        if buffer.trainable or buffer.wire_copy is not None or engine.parking.is_away(buffer.shard):
            return None
        start, _ = buffer.placement.slice_of(buffer.layout.numel, buffer.placement.mode.states)

        def note(begin: int, end: int) -> None:
            engine.note_issued(_EDIT, unit.index, begin ^ end)
            # Not hash(), which other builds of Python may have otherwise.
            engine.agreement.edits = zlib.crc32(f"{unit.index} {begin} {end}".encode(), engine.agreement.edits)

        return Edits(buffer.flat, buffer.shard, start, note)


def _set_values(values: Tensor, new: torch.Tensor) -> None:
    """Give cached weights new values in their place; what ``parameter.data = new`` does to a plain parameter."""
    if new.shape != values.shape:
        raise RuntimeError(
            f"parameter.data was set to a tensor of shape {tuple(new.shape)}, and the parameter, whose memory zeropp "
            f"manages, has {tuple(values.shape)}; give one of its shape"
        )
    # After ``parameter.data += x`` it is these very values.
    if new.data_ptr() != values.data_ptr() or new.stride() != values.stride():
        show(torch.Tensor.copy_, (values, new), {})


def _replaced(value: Any, shown_as: dict[int, Tensor]) -> Any:
    """Arguments with values in place of released parameters."""
    if isinstance(value, dict):
        return {key: _replaced(each, shown_as) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, shown_as) for each in value)
    return shown_as.get(id(value), value)
