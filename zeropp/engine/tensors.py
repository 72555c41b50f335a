"""Finding, converting and copying tensors in whatever a module takes or returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeropp._compat import storage_id

__all__ = ["cast_floating", "copy_views", "differentiable", "map_tensors", "tensors_in"]

_T = TypeVar("_T")


def differentiable(value: object) -> list[Tensor]:
    """Tensors that require grad, in tuples, lists, dicts, dataclasses and plain objects, each once."""
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_in(value: object) -> list[Tensor]:
    """All tensors in tuples, lists, dicts, dataclasses and plain objects, each once."""
    return [value] if isinstance(value, Tensor) else list(_walk(value, set()))


def _walk(value: object, seen: set[int]) -> Iterator[Tensor]:
    # Modules are left out: an output that names one would lead to every parameter below it.
    if value is None or isinstance(value, (int, float, str, bytes, type, nn.Module)) or id(value) in seen:
        return
    # Structures may hold themselves. All of it is held from outside, so no identity is used twice.
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _walk(item, seen)
    else:
        # Any object: model libraries return classes of their own, which backward would otherwise not be told of.
        names = [name for cls in type(value).__mro__ for name in _slots(cls)]
        for name in dict.fromkeys([*names, *getattr(value, "__dict__", {})]):
            yield from _walk(getattr(value, name, None), seen)


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def cast_floating(value: _T, dtype: torch.dtype) -> _T:
    """The same structure with floating tensors in ``dtype``; see :func:`map_tensors`."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def cast_inputs(
    args: tuple[object, ...], kwargs: dict[str, object], dtype: torch.dtype | None
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Inputs with floating tensors in ``dtype``, as a module's pre-hook returns them; None leaves them alone."""
    return None if dtype is None else (cast_floating(args, dtype), cast_floating(kwargs, dtype))


def map_tensors(value: _T, change: Callable[[Tensor], Tensor]) -> _T:
    """The same structure with ``change(tensor)`` in place of each tensor.

    Looks into tuples, lists, dicts and dataclasses; of these, whatever holds a tensor that changes is copied, and
    anything else is passed through as the very object it is.
    """
    changed: Any = value
    if isinstance(value, Tensor):
        changed = change(value)
    elif isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        # Where nothing changes the caller's very object goes on: it may be one that the module is to fill.
        if any(new is not old for new, old in zip(items, value, strict=True)):
            changed = _like(value, items)
    elif isinstance(value, MutableMapping):
        replaced = {key: map_tensors(item, change) for key, item in value.items()}
        if any(replaced[key] is not value[key] for key in replaced):
            changed = copy.copy(value)
            for key, item in replaced.items():
                # Item by item: not every mapping has update. A copy of it keeps what its class adds.
                changed[key] = item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # A field without init may not have been set.
            old = getattr(value, field.name, None)
            new = map_tensors(old, change)
            if new is not old:
                changed = copy.copy(value) if changed is value else changed
                # Past the class's own __setattr__: this copy is ours, of frozen classes, too.
                object.__setattr__(changed, field.name, new)
    return changed  # type: ignore[no-any-return]


def _like(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Other items in a sequence of the same class, whatever its constructor takes."""
    if isinstance(value, list):
        changed = copy.copy(value)
        changed[:] = items
        return changed
    # A named tuple takes its fields one by one; its _make takes them together.
    make = getattr(type(value), "_make", type(value))
    try:
        return make(items)
    except TypeError:
        # The constructor of this class takes something else.
        return tuple.__new__(type(value), items)


def copy_views(output: object, storages: Container[int], where: str) -> object:
    """A module's output with copies of whatever lies in one of ``storages``; the very object if nothing does.

    Args:
        output: as the module returned it.
        storages: identities of gathered weights' storages.
        where: the module's name.

    Raises:
        RuntimeError: a view of a weight is inside an object that cannot be rebuilt.
    """

    def lies_there(tensor: Tensor) -> bool:
        try:
            return storage_id(tensor) in storages
        except (NotImplementedError, RuntimeError):
            # Sparse, or inside a transform of torch.func: no storage of its own, so no view of ours.
            return False

    if not any(map(lies_there, tensors_in(output))):
        return output
    copied = map_tensors(output, lambda tensor: tensor.clone() if lies_there(tensor) else tensor)
    # Plain objects are looked into, and not rebuilt: nobody knows what their constructors do.
    if any(map(lies_there, tensors_in(copied))):
        raise RuntimeError(
            f"module {where or 'at the root'!r} returns a weight, or a view of one, inside a {type(output).__name__}, "
            "and the weight's memory goes when the module is left; return a copy of it, weight.clone()"
        )
    return copied
