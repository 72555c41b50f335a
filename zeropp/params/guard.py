"""The guard: control of every access to a parameter, or another tensor of the engine, whose values are not in memory.

A released parameter keeps its identity, shape and dtype but has no values. Its class is a generated subclass of its own
class. The ``__torch_function__`` of this subclass handles each access in one of four ways:

- *metadata*: shape, dtype and the like are read from the stand-in tensor.
- *fetch*: inside a pass, the unit is gathered and the operation runs on the parameter itself.
- *read*: between passes, the operation runs on cached whole values (:class:`ShownWeights`), if every rank caches them
  and they are up to date, as in stages 0 to 2. Edits are refused, unless a :class:`WeightReader` accepts them. A
  backward that reaches values read in this way is refused, too.
- *refuse*: all other operations raise an error that names the remedy.

A few functions access a tensor without calling ``__torch_function__``, such as ``torch.tensor(p)`` and ``vmap``. They
read NaN, because the data of a released parameter is one NaN element expanded to the parameter's shape.

Users also hold references to the engine's slices, gradients and optimizer states. While their memory is off the device,
torch would read from address 0 and crash the process. So these tensors get a subclass, too (:func:`make_unreadable`),
which raises an error that names the call to bring their memory back.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeropp._compat import break_graph, makes_graph, storage_id, uncompiled, unguarded
from zeropp._extensions import extensions

__all__ = [
    "EditTarget",
    "GuardHandler",
    "ShownWeights",
    "WeightReader",
    "guard",
    "guarded_class",
    "handler_of",
    "is_guarded",
    "is_managed",
    "make_readable",
    "make_unreadable",
    "nothing",
    "own_class",
    "own_dtype",
    "register",
    "set_class",
    "show",
    "unguard",
    "unregister",
]


# Attributes and methods that the stand-in answers correctly: it has the parameter's shape, dtype and device.
_GETTERS = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim", "names", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xpu", "is_xla", "is_ipu", "is_vulkan",
    "grad_fn", "_version", "itemsize", "nbytes", "retains_grad", "output_nr", "_backward_hooks", "name",
    "_post_accumulate_grad_hooks", "is_maia", "is_mtia",
)  # fmt: skip
_METHODS = (
    "size", "numel", "nelement", "dim", "ndimension", "is_floating_point", "is_complex",
    "is_signed", "element_size", "register_hook", "register_post_accumulate_grad_hook", "get_device",
    "is_shared", "is_pinned", "__len__", "is_same_size", "is_inference", "has_names", "is_conj", "is_neg",
    "is_distributed",
)  # fmt: skip


def _metadata_functions() -> frozenset[object]:
    """Return the functions that a released parameter answers from its stand-in."""
    found: set[object] = set()
    for name in _GETTERS:
        # Some versions of torch lack some of the names.
        if hasattr(torch.Tensor, name):
            # Reading an attribute passes this wrapper to ``__torch_function__``. Each look-up makes a new wrapper, and
            # equal wrappers have equal hashes. So compare wrappers by ``in`` and ``==``, never by ``is``.
            found.add(getattr(torch.Tensor, name).__get__)
    for name in _METHODS:
        if hasattr(torch.Tensor, name):
            found.add(getattr(torch.Tensor, name))
    for name in ("is_floating_point", "is_complex", "numel", "is_same_size", "is_tensor", "is_signed"):
        found.add(getattr(torch, name))
    return frozenset(found)


METADATA = _metadata_functions()
# Not part of METADATA, because the stand-in has one element and strides of 0. `_Tag.layout` answers these.
LAYOUT = (torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset)
# Functions that make a new tensor of the same shape and read no value; averages and manual gradients begin with them.
ALIKE = (
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
)  # fmt: skip
_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_COPY = torch.Tensor.copy_
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# Functions that read a parameter without starting a graph.
_UNTRACKED = (torch.Tensor.data.__get__, torch.Tensor.detach)  # type: ignore[attr-defined]
# In-place operations and setters whose names do not end in a single "_".
_WRITING = {
    "__setitem__", "__set__", "__delete__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip


class EditTarget(Protocol):
    """The receiver of edits made to weights that are shown between passes."""

    def take_edit(self, written: Tensor) -> None:
        """Apply an edit to the main weights; ``written`` is the view of shown weights that the user has written to."""
        ...

    def replace(self, weights: Tensor, new: Tensor) -> None:
        """Copy ``new`` into shown weights, because the user assigned ``new`` to their ``.data``."""
        ...


class WeightReader(Protocol):
    """An extension of the access to weights between passes.

    DeepSpeed's engine has one, so that scripts can read persistent parameters in stage 3 and edit frozen weights.

    Attributes:
        alone: True if ``state_dict()`` runs no collective, even if some values are not on this rank.
    """

    alone: bool

    def edits(self, parameter: nn.Parameter) -> EditTarget | None:
        """Return the target for edits of a parameter; None if edits are refused."""
        ...


class GuardHandler(Protocol):
    """The object that the guard calls for a released parameter: the engine or, before there is one, a `Piece`.

    Attributes:
        readable_weights: extension of the access between passes; None for the default access.
    """

    readable_weights: WeightReader | None = None

    def let_weights_be_read(self, reader: WeightReader) -> None:
        """Allow reads of persistent parameters of stage 3 between passes, and the edits that ``reader`` accepts."""
        self.readable_weights = reader

    def cached_values(self, parameter: nn.Parameter) -> Tensor | None:
        """Return whole values of a parameter to read between passes, in the compute dtype.

        None if the mode or the state of the engine forbids reading, or if this rank has no up-to-date whole values.
        """
        return None

    def fetch_touched(self, parameter: nn.Parameter) -> bool:
        """Gather a parameter that an operation uses, and return True; return False if no pass is running.

        A `Piece` gathers while the model is built, and raises an error afterwards.
        """
        ...

    def use_ended(self) -> None:
        """End the use of parameters by one operation. Handlers that keep the values until later do nothing here."""
        return

    def fetched_by(self, parameter: nn.Parameter) -> Collection[str]:
        """Return the paths of modules whose forward gathers a parameter if called directly; "" is the model itself."""
        return ()

    def has_pending_gradients(self) -> bool:
        """Return True if there are gradients that the optimizer has not stepped with yet, and no pass is running."""
        ...

    def forget_gradient(self, parameter: nn.Parameter) -> None:
        """Drop the reduced gradient of a parameter, if there is one."""
        ...

    def note_requires_grad(self, parameter: nn.Parameter, trained: bool) -> None:
        """Record that ``requires_grad`` of a parameter changes to ``trained``. The flag may be set already."""
        ...

    def take_loaded(self, parameter: nn.Parameter, values: torch.Tensor) -> bool:
        """Store values and return True if a state dict is being loaded; return False otherwise."""
        ...


class _Tag:
    """A parameter's name and its link to its handler; the link is weak, so that a parameter keeps no engine alive."""

    __slots__ = ("handler", "layout", "name", "own_dtype")

    def __init__(
        self, name: str, handler: GuardHandler, parameter: nn.Parameter, strides: tuple[int, ...], own: torch.dtype
    ) -> None:
        self.name = name
        self.handler = weakref.ref(handler)
        self.own_dtype = own
        # A meta tensor that answers for strides and contiguity only.
        self.layout = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device="meta")

    # Pickling a parameter pickles its ``__dict__`` and so calls this method. Refuse, because the file would contain the
    # memory of the whole unit.
    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"parameter {self.name!r} is managed by zeropp and cannot be pickled: it lies in the memory of its whole "
            "unit. Save parameter.detach().clone() inside zeropp.zero.GatheredParameters, or zeropp.full_state(model)"
        )


_GUARDS: dict[type[nn.Parameter], type[nn.Parameter]] = {}


def register(
    parameter: nn.Parameter, name: str, handler: GuardHandler, strides: tuple[int, ...], own_dtype: torch.dtype
) -> None:
    """Tag a parameter, so that the guard can find its name and handler.

    Args:
        parameter: parameter that already has its final shape and dtype.
        name: qualified name in the model, for errors.
        handler: object that keeps the parameter's values.
        strides: strides of the parameter while it has values.
        own_dtype: dtype of the parameter before the model was wrapped.
    """
    # Store the tag on the parameter, so that it can be found after the engine is gone.
    parameter._zeropp_tag = _Tag(name, handler, parameter, strides, own_dtype)  # type: ignore[attr-defined]


def unregister(parameter: nn.Parameter) -> None:
    """Remove the tag of a parameter that has its values, which makes it a plain parameter."""
    del parameter._zeropp_tag  # type: ignore[attr-defined]


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the NaN scalar that is every element of every released parameter of this dtype and device."""
    # The cache keeps one scalar per dtype and device forever, which costs one element each.
    return torch.full((), float("nan"), dtype=dtype, device=device)


def own_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype that a parameter had before the model was wrapped."""
    tag = parameter.__dict__.get("_zeropp_tag")
    return tag.own_dtype if tag is not None else parameter.dtype


def handler_of(parameter: torch.Tensor) -> GuardHandler | None:
    """Return the object that manages a parameter; None if there is none or it is gone."""
    tag = parameter.__dict__.get("_zeropp_tag")
    return tag.handler() if tag is not None else None


def is_managed(parameter: torch.Tensor) -> bool:
    """Return True if an engine manages a parameter, or if the parameter is in pieces (`Piece`).

    The result stays True if the engine is dropped, or closed without giving the parameter its values.
    """
    return "_zeropp_tag" in parameter.__dict__


def guard(parameters: Iterable[nn.Parameter]) -> None:
    """Change the class of each parameter to its guarded subclass."""
    for parameter in parameters:
        parameter.__class__ = guarded_class(type(parameter))


def unguard(parameters: Iterable[nn.Parameter]) -> None:
    """Change the class of each parameter back to its own class."""
    for parameter in parameters:
        parameter.__class__ = own_class(parameter)


def own_class(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class of a parameter while it is not guarded."""
    cls: type[nn.Parameter] = getattr(type(parameter), "_zeropp_own_class", type(parameter))
    return cls


def is_guarded(parameter: torch.Tensor) -> bool:
    """Return True if a parameter is released and has the guarded class."""
    return hasattr(type(parameter), "_zeropp_own_class")


def set_class(tensor: Tensor, cls: type[Tensor]) -> None:
    """Change the class of a tensor to one with the same memory layout; all references to the tensor see the change.

    Raises:
        TypeError: The memory layouts differ, as with ``__slots__``.
    """
    tensor.__class__ = cls


def guarded_class(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the guarded subclass of a class of parameters; a guarded class itself.

    Guarding changes the class and keeps the object, so that optimizers, tied modules and hooks keep their references.
    Python allows this because the subclass adds nothing to the memory layout.
    """
    if hasattr(cls, "_zeropp_own_class"):
        return cls
    # Make one subclass per class, so that parameters of one type still have one type.
    if cls not in _GUARDS:
        namespace = {
            "_zeropp_own_class": cls,
            "__torch_function__": classmethod(_intercept),
            # torch's own ``__deepcopy__`` looks at the class before it reads the values, and would copy the guarded
            # class.
            "__deepcopy__": _deepcopy,
            # Debuggers and logs print parameters at any time, so printing must neither gather a unit nor raise.
            "__repr__": _describe,
            "__format__": lambda parameter, spec: format(_describe(parameter), spec),
        }
        for extension in extensions():
            namespace |= extension.released
        _GUARDS[cls] = _subclass(cls, "Released", namespace)
    return _GUARDS[cls]


def _subclass(cls: type[Any], prefix: str, namespace: dict[str, Any]) -> type[Any]:
    return types.new_class(f"{prefix}{cls.__name__}", (cls,), exec_body=lambda body: body.update(namespace))


def _describe(parameter: nn.Parameter) -> str:
    tag = parameter.__dict__.get("_zeropp_tag")
    name = tag.name if tag is not None else "?"
    return f"<parameter {name!r} managed by zeropp, shape {tuple(parameter.shape)}, {parameter.dtype}>"


def _deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """Return a plain parameter with a copy of the whole values, if these can be read."""
    # Reading ``.data`` inside a pass gathers the parameter and unguards it. Holding the values keeps them alive until
    # the class's own ``__deepcopy__`` has run.
    values = parameter.data
    if is_guarded(parameter):
        # The parameter is still guarded: its cached values were only read, so make the copy from them.
        made = parameter.__class__._zeropp_own_class(values.clone(), parameter.requires_grad)  # type: ignore[attr-defined]
        memo[id(parameter)] = made
        return made  # type: ignore[no-any-return]
    copied: nn.Parameter = type(parameter).__deepcopy__(parameter, memo)
    del values
    return copied


def _flattened(values: Iterable[object]) -> Iterator[object]:
    """Yield all values, with lists, tuples and dicts replaced by their elements."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flattened(value)
        elif isinstance(value, dict):
            yield from _flattened(value.values())
        else:
            yield value


def _released(args: Iterable[object]) -> Iterator[nn.Parameter]:
    """Yield the guarded parameters among arguments."""
    for arg in _flattened(args):
        if hasattr(type(arg), "_zeropp_own_class"):
            yield arg  # type: ignore[misc]


@uncompiled
def _intercept(
    cls: type,
    func: Callable[..., Any],
    involved: tuple[type, ...],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> object:
    """Handle one torch function whose arguments contain a guarded parameter."""
    kwargs = kwargs or {}
    if func is torch.autograd.grad and not any(_released(args[:1])):
        return _gradients(*args, **kwargs)
    if func is torch.autograd.backward:
        _refuse_inputs(kwargs.get("inputs") or ())
    with unguarded():  # functions called below must not be intercepted again
        # ``type()`` without arguments only returns a name; with an argument it converts values.
        if func in METADATA or (func is torch.Tensor.type and len(args) == 1 and not kwargs):
            return func(*args, **kwargs)
        touched: list[GuardHandler] = []
        read: dict[int, ShownWeights] = {}
        for parameter in _released((*args, *kwargs.values())):
            tag = parameter.__dict__["_zeropp_tag"]
            if func in LAYOUT:
                return func(tag.layout, *args[1:], **kwargs)
            if func in ALIKE and args and args[0] is parameter:
                return func(tag.layout, *args[1:], **{"device": parameter.device, **kwargs})
            handler = _handler(tag)
            if makes_graph() and not handler.fetch_touched(parameter):
                # Break the graph: compiled code would read the stand-in's NaN without calling the guard.
                break_graph(f"parameter {tag.name!r} is managed by zeropp and used outside forward and backward")
            if func in (_GET_GRAD, _SET_GRAD):
                # Handle gradients apart from values, because reading a gradient must not gather the unit.
                return _gradient_access(func, args, kwargs, tag.name, handler)
            if func in (torch.Tensor.requires_grad_, _SET_REQUIRES_GRAD):
                trained = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
                if trained != parameter.requires_grad:
                    # Record the change on this rank and set the flag. All ranks compare their flags at the next
                    # forward.
                    handler.note_requires_grad(parameter, trained)
                return func(*args, **kwargs)
            # The source must not be released itself, or the NaN of its stand-in would be loaded.
            loads = func is _COPY and parameter is args[0] and not is_guarded(args[1])
            if loads and handler.take_loaded(parameter, args[1]):
                return parameter
            if handler.fetch_touched(parameter):
                touched.append(handler)
                continue
            read[id(parameter)] = _shown_between_passes(func, tag.name, parameter, handler)
        # By now, each released argument is either gathered and unguarded, or has cached values in ``read``.
        try:
            if read:
                return show(func, _replaced(args, read), _replaced(kwargs, read))
            return func(*args, **kwargs)
        finally:
            for handler in touched:
                handler.use_ended()


def _handler(tag: _Tag) -> GuardHandler:
    """Return the handler of a tagged parameter.

    Raises:
        RuntimeError: The engine that kept the values is gone.
    """
    handler = tag.handler()
    if handler is None:
        raise RuntimeError(
            f"parameter {tag.name!r} has no values any more: the engine that kept them is gone, its model dropped or "
            "closed. Keep the model, or any module of it, or save zeropp.full_state(model) before"
        )
    return handler


def _gradients(
    outputs: Any, inputs: Iterable[Any], *, materialize_grads: bool = False, **settings: Any
) -> tuple[Tensor | None, ...]:
    """Run ``torch.autograd.grad`` with respect to released parameters; arguments as for ``torch.autograd.grad``.

    Parameters are replaced by their edges in the autograd graph, which need no values. Hooks gather the units that this
    backward reaches. With the parameters themselves, the backward would run with the guard turned off.
    """
    inputs = tuple(inputs)
    edges = [_edge_of(each) if is_guarded(each) else each for each in inputs]
    found: tuple[Tensor | None, ...] = torch.autograd.grad(outputs, edges, **settings)
    if not materialize_grads:
        return found
    return tuple(torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True))


def _refuse_inputs(inputs: Iterable[object]) -> None:
    """Refuse released parameters as ``inputs`` of a backward.

    Raises:
        RuntimeError: ``inputs`` contains a released parameter.
    """
    for parameter in _released(inputs):
        name = parameter.__dict__["_zeropp_tag"].name
        raise RuntimeError(
            f"backward(inputs=...) was given parameter {name!r}, which is managed by zeropp. Its gradient is reduced "
            "over ranks in a backward of the whole graph: call backward() without inputs, and before the forward "
            "requires_grad_(False) on parameters that are to get no gradient. torch.autograd.grad(loss, [parameter]) "
            "gives this rank's own gradient, in every stage, and leaves the optimizer's as they are"
        )


def _edge_of(parameter: nn.Parameter) -> GradientEdge:
    """Return the edge of the autograd graph that ends at a parameter.

    Raises:
        RuntimeError: The parameter does not require grad, so there is no such edge.
    """
    if not parameter.requires_grad:
        raise RuntimeError(
            f"torch.autograd.grad was asked for the gradient of parameter {parameter.__dict__['_zeropp_tag'].name!r}, "
            "which does not require grad; leave it out, or call requires_grad_() on it before the forward"
        )
    with unguarded():
        return get_gradient_edge(parameter)


def _gradient_access(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str, handler: GuardHandler
) -> object:
    """Handle reading or setting ``.grad`` of a released parameter.

    Reduced gradients are in the optimizer's shards and not in ``.grad``. Returning None would make clipping and logging
    silently wrong.

    Raises:
        RuntimeError: A gradient was set, or ``.grad`` was read while there are reduced gradients.
    """
    if func == _SET_GRAD and args[1] is not None:
        raise RuntimeError(
            f"the gradient of {name!r} was set, but the optimizer steps on gradients in memory of its own, which only "
            "backward fills. Edit the .grad of the parameters in optimizer.param_groups, this rank's slices, or use "
            "optimizer.clip_grad_norm_(max_norm)"
        )
    # ``grad = None`` drops the gradient from the shard, because the gradient is stored there.
    if func == _SET_GRAD:
        handler.forget_gradient(args[0])
    if handler.has_pending_gradients() and func == _GET_GRAD:
        raise RuntimeError(
            f"the gradient of {name!r} is in memory of the optimizer and not in .grad; use "
            "optimizer.clip_grad_norm_(max_norm) to clip, optimizer.grad_norm to log, and optimizer.zero_grad() to "
            "clear"
        )
    return func(*args, **kwargs)


def _name_of(func: Callable[..., Any]) -> str:
    """Return a function's name for errors, with the attribute's name for attribute access."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f".{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return str(name)


def _refusal(func: Callable[..., Any], name: str, parameter: nn.Parameter, handler: GuardHandler) -> RuntimeError:
    """Return the error for an operation on a released parameter that cannot be served."""
    fetched_by = handler.fetched_by(parameter)
    names = " or ".join(f"module {path!r}" if path else "the model" for path in fetched_by) or "the model"
    around = ", or one around it" if fetched_by and "" not in fetched_by else ""
    return RuntimeError(
        f"{_name_of(func)} on parameter {name!r}: zeropp keeps its values elsewhere between passes, shape "
        f"{tuple(parameter.shape)}. Outside forward and backward only its shape, dtype and the like can be read. To "
        f"compute with it call {names}, which fetches it{around}; a module inside it, called alone, does not. To read "
        "or edit values use, on every rank, zeropp.zero.GatheredParameters(parameters, modifier_rank=None or a "
        "rank), model.state_dict(), zeropp.full_state(model) or model.load_state_dict(...)"
    )


# Reading between passes.


class ShownWeights(torch.Tensor):
    """A tensor that shows cached weights between passes.

    Views of it have this class, too. Results computed from it are plain tensors.

    Attributes:
        parameter_name: name of the parameter in the model.
        edits: target of edits; None if edits are refused.
    """

    parameter_name = ""
    edits: EditTarget | None = None

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
        """Return a plain copy with memory of its own."""
        copied = self.clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, because a file that names this class could not be read without zeropp."""
        with unguarded():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


class _LookedAt(torch.autograd.Function):
    """An identity function on shown weights whose backward raises."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> NoReturn:
        raise RuntimeError(
            "backward reached weights that were read between passes, and their gradients would not be reduced over "
            "ranks; compute a penalty on weights inside the model's forward, or use .detach() to only read weights"
        )


def _shown_between_passes(
    func: Callable[..., Any], name: str, parameter: nn.Parameter, handler: GuardHandler
) -> ShownWeights:
    """Return the cached whole values of a released parameter.

    Raises:
        RuntimeError: The values may not be read between passes, or are not on this rank.
    """
    values = handler.cached_values(parameter)
    if values is None:
        # Refuse instead of gathering: outside a pass no other rank would join the collective, and this rank would hang.
        raise _refusal(func, name, parameter, handler)
    if parameter.requires_grad and torch.is_grad_enabled() and func not in _UNTRACKED:
        # Scripts log norms without no_grad(), so a graph may begin here. A backward through it must raise, not lose the
        # gradient silently.
        values = _LookedAt.apply(values.detach().requires_grad_())  # type: ignore[no-untyped-call]
    reader = handler.readable_weights
    return _shown_as(values, name, None if reader is None else reader.edits(parameter))


def _shown_as(values: Tensor, name: str, edits: EditTarget | None) -> ShownWeights:
    """Return values as :class:`ShownWeights` of a parameter."""
    found = values.as_subclass(ShownWeights)
    found.parameter_name = name
    found.edits = edits
    return found


def show(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on shown weights.

    Args:
        func: function that torch was asked to run.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The function's result; views of shown weights in it are shown weights, too.

    Raises:
        RuntimeError: The function would write to the weights and edits are refused, or their memory has been freed.
    """
    # Turn interception off for the whole body: reading the storage of shown weights would be intercepted, too.
    with unguarded():
        involved = list(_shown((args, kwargs)))
        edited = list(_shown(_written(func, args, kwargs)))
        _refuse_edits(func, edited)
        _refuse_freed(func, involved)
        if func == _SET_DATA and edited and edited[0].edits is not None:
            return edited[0].edits.replace(edited[0], args[1])
        result = func(*args, **kwargs)
        for each in edited:
            if each.edits is not None:
                with torch.no_grad():
                    each.edits.take_edit(each)
        return _marked(result, {storage_id(each): each for each in involved})


def _refuse_edits(func: Callable[..., Any], edited: Iterable[ShownWeights]) -> None:
    for each in edited:
        if each.edits is None:
            raise RuntimeError(
                f"{_name_of(func)} on parameter {each.parameter_name!r}: between passes its values can be read and not "
                "edited: the edit would reach neither the main weights nor other ranks. To edit it use, on every rank, "
                "zeropp.zero.GatheredParameters(parameters, modifier_rank=a rank) or model.load_state_dict(...); to "
                "change a copy alone, .clone() it first"
            )


def _refuse_freed(func: Callable[..., Any], involved: Iterable[ShownWeights]) -> None:
    for each in involved:
        # torch would read from address 0 and crash the process.
        if each.numel() and not each.untyped_storage().nbytes() and func not in METADATA:
            raise RuntimeError(
                f"{_name_of(func)} on values of parameter {each.parameter_name!r} whose memory was freed after they "
                "were read, for instance by optimizer.offload_states(); call optimizer.reload_states() first, on every "
                "rank, or keep a copy, .clone()"
            )


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
    """Return the arguments that a function writes to."""
    written = [kwargs.get("out")]
    name = getattr(func, "__name__", "")
    if name in _WRITING or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True:
        # In-place operations of torch write to their first argument, whatever its name.
        written += args[:1] or kwargs.values()
    return written


def _shown(values: Iterable[object]) -> Iterator[ShownWeights]:
    """Yield the shown weights among some values."""
    for each in _flattened(values):
        if isinstance(each, ShownWeights):
            yield each


def _marked(result: Any, sources: dict[int, ShownWeights]) -> Any:
    """Return a result in which tensors that share memory with shown weights are shown weights, too."""
    if isinstance(result, Tensor):
        # This includes results that are the argument itself, as of contiguous().
        source = sources.get(storage_id(result))
        return result if source is None else _shown_as(result, source.parameter_name, source.edits)
    if isinstance(result, list | tuple) and not hasattr(result, "_fields"):
        return type(result)(_marked(each, sources) for each in result)
    return result


def _replaced(value: Any, shown: dict[int, ShownWeights]) -> Any:
    """Return arguments in which released parameters are replaced by their shown values."""
    if isinstance(value, dict):
        return {key: _replaced(each, shown) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, shown) for each in value)
    return shown.get(id(value), value)


# Tensors whose memory is off the device.

# Functions that need no memory. A slice's ``.grad`` stays accessible, so that ``zero_grad`` can drop it.
_ANSWERED = METADATA.union(LAYOUT, (Tensor.untyped_storage, Tensor.grad.__get__, Tensor.grad.__set__, Tensor.__hash__))  # type: ignore[union-attr]


def make_unreadable(tensor: Tensor, why: str) -> None:
    """Make every use of a tensor raise an error; ``why`` is the end of the error's text, after "of a tensor"."""
    # Change the class of the object, so that the error is raised whichever reference and function the user uses.
    set_class(tensor, _refusing(type(tensor), why))


def make_readable(tensor: Tensor) -> None:
    """Undo :func:`make_unreadable`."""
    set_class(tensor, getattr(type(tensor), "_zeropp_readable_class", type(tensor)))


# Make one class per tensor class and reason. There are few reasons, however many tensors there are.
@functools.cache
def _refusing(cls: type[Tensor], why: str) -> type[Tensor]:
    def intercept(
        cls: type, func: Callable[..., Any], involved: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        # Answer functions that need no memory, because optimizers and schedulers read shapes and devices all the time.
        if func in _ANSWERED:
            with unguarded():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(f"{getattr(func, '__name__', func)} of a tensor {why}")

    def describe(tensor: Tensor, *_: object, **__: object) -> str:
        return f"<tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, {why}>"

    namespace = {
        "_zeropp_readable_class": cls,
        "__torch_function__": classmethod(intercept),
        # Logs and debuggers print tensors at any time, so printing must not raise.
        "__repr__": describe,
        "__format__": lambda tensor, spec: format(describe(tensor), spec),
    }
    return _subclass(cls, "Unreadable", namespace)
