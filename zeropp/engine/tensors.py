"""Finding and converting tensors in whatever a module takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["cast_floating", "differentiable"]

_T = TypeVar("_T")


def differentiable(value: object) -> list[Tensor]:
    """Tensors that require grad, in tuples, lists, dicts, dataclasses and plain objects, each once."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    return [tensor for tensor in _walk(value, set()) if tensor.requires_grad]


def _walk(value: object, seen: set[int]) -> Iterator[Tensor]:
    if value is None or isinstance(value, (int, float, str, bytes, type, nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _walk(item, seen)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _walk(item, seen)
    else:
        for name in getattr(type(value), "__slots__", ()):
            yield from _walk(getattr(value, name, None), seen)


def cast_floating(value: _T, dtype: torch.dtype) -> _T:
    """The same structure with floating tensors in ``dtype``; what holds none is passed through untouched."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value  # type: ignore[return-value]
    if isinstance(value, tuple):
        items = [cast_floating(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [cast_floating(item, dtype) for item in value]  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: cast_floating(item, dtype) for key, item in value.items()}  # type: ignore[return-value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: cast_floating(item, dtype) for name, item in fields.items()})
    return value
