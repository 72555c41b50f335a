"""Tensors that are there, and whose memory is not: any use but of what they are raises, with what to call.

torch itself reads from address 0 then, and the process ends. Slices, their gradients and optimizer states are objects
that the user holds, so they take on a subclass of their own class meanwhile, as released parameters do.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from zeropp._compat import unguarded
from zeropp.params.guard import LAYOUT, METADATA

__all__ = ["make_readable", "make_unreadable"]

# A slice keeps its gradient, whatever has become of either, so that ``zero_grad`` may drop it.
_ANSWERED = METADATA.union(LAYOUT, (Tensor.untyped_storage, Tensor.grad.__get__, Tensor.grad.__set__, Tensor.__hash__))  # type: ignore[union-attr]


def make_unreadable(tensor: Tensor, why: str) -> None:
    """Refuse every use of a tensor; ``why`` goes on after its shape in the error."""
    # As the guard does for parameters: whoever holds the object meets it, whatever they call with it.
    tensor.__class__ = _refusing(type(tensor), why)


def make_readable(tensor: Tensor) -> None:
    """Take that back."""
    tensor.__class__ = getattr(type(tensor), "_zeropp_readable_class", type(tensor))


# One class for each class and reason, which are few, however many tensors there are.
@functools.cache
def _refusing(cls: type[Tensor], why: str) -> type[Tensor]:
    def intercept(
        cls: type, func: Callable[..., Any], involved: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        # Whatever needs no memory: optimizers and schedulers ask for shapes and devices all the time.
        if func in _ANSWERED:
            with unguarded():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(f"{getattr(func, '__name__', func)} of a tensor {why}")

    def describe(tensor: Tensor, *_: object, **__: object) -> str:
        return f"<tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, {why}>"

    namespace = {
        "_zeropp_readable_class": cls,
        "__torch_function__": classmethod(intercept),
        # Logs and debuggers print tensors at any time.
        "__repr__": describe,
        "__format__": lambda tensor, spec: format(describe(tensor), spec),
    }
    return types.new_class(f"Unreadable{cls.__name__}", (cls,), exec_body=lambda body: body.update(namespace))
