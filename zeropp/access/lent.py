"""Tensors and graphs that are computed from whole values while these are lent to the user.

Outside a pass a graph through a whole value leads nowhere: the value goes back, and no gradient is reduced. To read is
fine, with grad mode on, too. So results carry a hook that backward trips over, and whoever ends the loan can ask which
graphs outlive it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zeropp.engine.tensors import tensors_in

__all__ = ["Graphs"]

_PACKAGES = ("torch", "zeropp")


class Graphs(TorchFunctionMode):
    """While this mode is on, notes the lines that begin graphs through lent values.

    Args:
        names: of the parameters that are lent.
    """

    def __init__(self, names: Mapping[nn.Parameter, str]) -> None:
        super().__init__()
        self._names = {id(parameter): name for parameter, name in names.items()}
        # Weakly: what is alive at the end is what the user still holds.
        self._hooks: list[weakref.ref[_Trip]] = []
        # Views of lent values; what is computed from them counts as well. Held, so that no other tensor takes an id.
        self._views: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Under no_grad there is no graph that could outlive the loan.
        for name in self._named((*args, *kwargs.values())) if torch.is_grad_enabled() else ():
            for tensor in tensors_in(result):
                if tensor.grad_fn is not None:
                    if tensor._is_view():
                        self._names[id(tensor)] = name
                        self._views.append(tensor)
                    # Not an error yet: to read a norm with grad mode on is fine, and its graph goes with the result.
                    trip = _Trip(name, _line_of_user())
                    tensor.register_hook(trip)
                    self._hooks.append(weakref.ref(trip))
        return result

    def _named(self, args: Iterable[object]) -> Iterator[str]:
        """Lent parameters among arguments, lists and dicts included."""
        for arg in args:
            if id(arg) in self._names:
                yield self._names[id(arg)]
            elif isinstance(arg, (list, tuple)):
                yield from self._named(arg)
            elif isinstance(arg, dict):
                yield from self._named(arg.values())

    def alive(self) -> list[str]:
        """Lines where graphs began that somebody still holds; at the end of the loan."""
        # Ours must not count among those that hold a graph.
        self._views.clear()
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
    """The line of the caller outside of torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PACKAGES:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
