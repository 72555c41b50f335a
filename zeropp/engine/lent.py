"""What a parameter is while its whole value is lent to the user: itself, but what is computed from it is watched.

Outside a pass a graph through a whole value leads nowhere: the value goes back, and no gradient is reduced. To read is
fine, with grad mode on, too. So results carry a hook that backward trips over, and who ends the loan can ask which
graphs outlive it.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.engine.tensors import tensors_in

__all__ = ["Graphs", "lend", "take_back"]

_PACKAGES = ("torch", "zeropp")
_WATCHED = "_zeropp_lent"  # (graphs, name) in a lent parameter's __dict__
_CLASSES: dict[type[nn.Parameter], type[nn.Parameter]] = {}


class Graphs:
    """Graphs through lent values, and the lines that began them."""

    def __init__(self) -> None:
        self._hooks: list[weakref.ref[_Trip]] = []

    def note(self, result: Tensor, name: str) -> None:
        """``result`` was computed from the value of a parameter."""
        trip = _Trip(name, _line_of_user())
        result.register_hook(trip)
        self._hooks.append(weakref.ref(trip))

    def alive(self) -> list[str]:
        """Where those were computed that somebody still holds."""
        return list(dict.fromkeys(str(trip) for ref in self._hooks if (trip := ref()) is not None))


class _Trip:
    """A hook; it lives as long as the graph that it is in."""

    def __init__(self, name: str, line: str) -> None:
        self._name = name
        self._line = line

    def __str__(self) -> str:
        return f"{self._line} from {self._name!r}"

    def __call__(self, gradient: Tensor) -> None:
        raise RuntimeError(
            f"backward came to what was computed at {self} inside GatheredParameters, and no gradient of it would be "
            "reduced. Compute a penalty on weights inside the model's forward, and return it or keep it on the module"
        )


def _line_of_user() -> str:
    """Where the caller outside of torch and this package is."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def lend(parameter: nn.Parameter, name: str, graphs: Graphs) -> None:
    """Watch a parameter that has been given its value."""
    parameter.__dict__[_WATCHED] = graphs, name
    parameter.__class__ = _lent(type(parameter))


def take_back(parameter: nn.Parameter) -> None:
    """Give a parameter its own class back."""
    parameter.__class__ = type(parameter)._zeropp_lent_class  # type: ignore[attr-defined]
    del parameter.__dict__[_WATCHED]


def _lent(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    if cls not in _CLASSES:
        namespace = {
            "_zeropp_lent_class": cls,
            "__torch_function__": classmethod(_intercept),
            # Copies and files are of the own class.
            "__deepcopy__": lambda parameter, memo: memo.setdefault(id(parameter), _copy(parameter, clone=True)),
            "__reduce_ex__": lambda parameter, protocol: _copy(parameter, clone=False).__reduce_ex__(protocol),
        }
        _CLASSES[cls] = types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(namespace))
    return _CLASSES[cls]


def _copy(parameter: nn.Parameter, *, clone: bool) -> nn.Parameter:
    value = parameter.data.clone() if clone else parameter.data
    own: type[nn.Parameter] = type(parameter)._zeropp_lent_class  # type: ignore[attr-defined]
    return own(value, parameter.requires_grad)


def _watched(args: Iterable[object]) -> Iterator[tuple[Graphs, str]]:
    """Of lent parameters among arguments, lists and dicts included."""
    for arg in args:
        if _WATCHED in getattr(arg, "__dict__", ()):
            yield arg.__dict__[_WATCHED]
        elif isinstance(arg, (list, tuple)):
            yield from _watched(arg)
        elif isinstance(arg, dict):
            yield from _watched(arg.values())


def _intercept(
    cls: type,
    func: Callable[..., Any],
    involved: tuple[type, ...],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> object:
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        for graphs, name in _watched((*args, *kwargs.values())) if torch.is_grad_enabled() else ():
            for tensor in tensors_in(result):
                if tensor.grad_fn is not None:
                    graphs.note(tensor, name)
    return result
