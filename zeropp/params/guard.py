"""The guard: what happens when somebody uses a parameter, or another tensor of the engine, that has no values there.

A released parameter keeps its identity, shape and dtype, but it has no values. So it takes on a cached subclass of
its own class, whose ``__torch_function__`` gives one of four answers:

- *metadata*: shape, dtype and the like are answered from the stand-in;
- *fetch*: inside a pass the unit is gathered, and the operation runs on the parameter itself;
- *read*: between passes the operation runs on the whole values, where every rank caches them and they are the newest
  (:class:`ShownWeights`): in stages 0 to 2. An edit is refused, and so is a backward that comes to what was read;
- *refuse*: anything else raises with the remedy.

The few ways into a tensor that torch does not report, ``torch.tensor(p)`` and ``vmap`` among them, find NaN: the
parameter's data is then a single NaN seen at every index.

Slices, gradients and optimizer states are objects that the user holds. While their memory is off the device, torch
would read from address 0 and end the process. So they take on a subclass too (:func:`make_unreadable`), which raises
with the call that brings them back.
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
    "handler_of",
    "is_guarded",
    "is_managed",
    "make_readable",
    "make_unreadable",
    "nothing",
    "own_dtype",
    "register",
    "set_class",
    "show",
    "unguard",
    "unregister",
]


# What the stand-in answers rightly by itself: it has the true shape, dtype and device.
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
    found: set[object] = set()
    for name in _GETTERS:
        # Not every version of torch has all of them.
        if hasattr(torch.Tensor, name):
            # ``__torch_function__`` is given this for an attribute. Each look-up makes a new wrapper, and equal ones
            # hash alike: compare them by ``in`` and ``==``, never by ``is``.
            found.add(getattr(torch.Tensor, name).__get__)
    for name in _METHODS:
        if hasattr(torch.Tensor, name):
            found.add(getattr(torch.Tensor, name))
    for name in ("is_floating_point", "is_complex", "numel", "is_same_size", "is_tensor", "is_signed"):
        found.add(getattr(torch, name))
    return frozenset(found)


METADATA = _metadata_functions()
# Not among the metadata: the stand-in is one element with strides of 0.
LAYOUT = (torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset)
# New tensors of the same shape: averages and gradients made by hand begin so, and read no value.
ALIKE = (
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
)  # fmt: skip
_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_COPY = torch.Tensor.copy_
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# These read a parameter, and no graph begins at what they give.
_UNTRACKED = (torch.Tensor.data.__get__, torch.Tensor.detach)  # type: ignore[attr-defined]
# Operations in place whose names do not end in "_".
_WRITING = {
    "__setitem__", "__set__", "__delete__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
}  # fmt: skip


class EditTarget(Protocol):
    """The main weights behind shown ones, for weights whose edits are kept."""

    def take_edit(self, written: Tensor) -> None:
        """Take over an edit; ``written`` is a view of shown weights that has been written to."""
        ...

    def replace(self, weights: Tensor, new: Tensor) -> None:
        """Give shown weights the values of ``new``, which were assigned to their ``.data``."""
        ...


class WeightReader(Protocol):
    """More access to weights between passes than the core gives: DeepSpeed's engine lets its scripts edit frozen ones.

    Attributes:
        alone: ``state_dict()`` takes no other rank, whatever is not here.
    """

    alone: bool

    def edits(self, parameter: nn.Parameter) -> EditTarget | None:
        """The target of edits of a parameter; None if they are refused."""
        ...


class GuardHandler(Protocol):
    """Who answers for a released parameter: the engine, seen from here; before there is one, the parameter's piece.

    Attributes:
        readable_weights: more access between passes than the core gives; None for none.
    """

    readable_weights: WeightReader | None = None

    def let_weights_be_read(self, reader: WeightReader) -> None:
        """Let small weights of stage 3 be read between passes, too, and edits be made that ``reader`` takes."""
        self.readable_weights = reader

    def cached_values(self, parameter: nn.Parameter) -> Tensor | None:
        """Whole values to read between passes, in the dtype that the model computes in.

        None if the mode or the engine allows no reading, or they are not on this rank, or not the newest.
        """
        return None

    def fetch_touched(self, parameter: nn.Parameter) -> bool:
        """Make the values present if the model is running; False otherwise."""
        ...

    def use_ended(self) -> None:
        """The operation is done that touched parameters. Nothing to do for who keeps their values for longer."""
        return

    def fetched_by(self, parameter: nn.Parameter) -> Collection[str]:
        """The paths of modules whose forward fetches a parameter when they are called alone; "" is the model."""
        return ()

    def has_pending_gradients(self) -> bool:
        """True if gradients wait for the optimizer."""
        ...

    def forget_gradient(self, parameter: nn.Parameter) -> None:
        """Drop the partitioned gradient of a parameter, if it has one."""
        ...

    def note_requires_grad(self, parameter: nn.Parameter, trained: bool) -> None:
        """Take note that ``requires_grad`` is about to change."""
        ...

    def take_loaded(self, parameter: nn.Parameter, values: torch.Tensor) -> bool:
        """Store values while a state dict is being loaded; False at any other time."""
        ...


class _Tag:
    """Tie from a parameter to its name and handler; weak, so that a parameter keeps no engine alive."""

    __slots__ = ("handler", "layout", "name", "own_dtype")

    def __init__(
        self, name: str, handler: GuardHandler, parameter: nn.Parameter, strides: tuple[int, ...], own: torch.dtype
    ) -> None:
        self.name = name
        self.handler = weakref.ref(handler)
        self.own_dtype = own
        # No memory behind it: it answers for strides and contiguity only.
        self.layout = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device="meta")

    # Pickling a parameter takes its ``__dict__`` along, and so comes here: what would be saved is NaN.
    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"parameter {self.name!r} is managed by zeropp and cannot be pickled: it lies in the memory of its whole "
            "unit. Save parameter.detach().clone() inside zeropp.zero.GatheredParameters, or zeropp.full_state(model)"
        )


_GUARDS: dict[type[nn.Parameter], type[nn.Parameter]] = {}


def register(
    parameter: nn.Parameter, name: str, handler: GuardHandler, strides: tuple[int, ...], own_dtype: torch.dtype
) -> None:
    """Tell the guard about a parameter.

    Args:
        parameter: with the shape and dtype it has from now on.
        name: in the model.
        handler: who keeps its values.
        strides: when its values are there.
        own_dtype: before it was wrapped.
    """
    # On the parameter itself, where it is found without the engine, which may be gone.
    parameter._zeropp_tag = _Tag(name, handler, parameter, strides, own_dtype)  # type: ignore[attr-defined]


def unregister(parameter: nn.Parameter) -> None:
    """A parameter that has its values is a plain one again."""
    del parameter._zeropp_tag  # type: ignore[attr-defined]


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The value of every element of every released parameter: a scalar."""
    # One for each dtype and device: kept for good, it costs an element.
    return torch.full((), float("nan"), dtype=dtype, device=device)


def own_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype that a parameter has of its own, whatever it is computed with."""
    tag = parameter.__dict__.get("_zeropp_tag")
    return tag.own_dtype if tag is not None else parameter.dtype


def handler_of(parameter: torch.Tensor) -> GuardHandler | None:
    """The engine that manages a parameter, if one does."""
    tag = parameter.__dict__.get("_zeropp_tag")
    return tag.handler() if tag is not None else None


def is_managed(parameter: torch.Tensor) -> bool:
    """Tell whether an engine manages a parameter, or did until it was dropped or closed."""
    return "_zeropp_tag" in parameter.__dict__


def guard(parameters: Iterable[nn.Parameter]) -> None:
    """Give each parameter its guarded class."""
    for parameter in parameters:
        # The object stays, so optimizers, ties and hooks keep it. Python allows it, since the subclass
        # adds nothing to the layout.
        parameter.__class__ = _guarded(type(parameter))


def unguard(parameters: Iterable[nn.Parameter]) -> None:
    """Give each parameter its own class back."""
    for parameter in parameters:
        parameter.__class__ = getattr(type(parameter), "_zeropp_own_class", type(parameter))


def is_guarded(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter's values are elsewhere."""
    return hasattr(type(parameter), "_zeropp_own_class")


def set_class(tensor: Tensor, cls: type[Tensor]) -> None:
    """Let a tensor be of another class with the same layout; whoever holds the object meets what that class does.

    Raises:
        TypeError: the layout is another one, as with ``__slots__``.
    """
    tensor.__class__ = cls


def _guarded(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    if hasattr(cls, "_zeropp_own_class"):
        return cls
    # One subclass for each class: parameters of one type keep one type.
    if cls not in _GUARDS:
        namespace = {
            "_zeropp_own_class": cls,
            "__torch_function__": classmethod(_intercept),
            # torch's own asks for the class before it asks for the values.
            "__deepcopy__": _deepcopy,
            # A debugger or a log prints parameters at any time; that must neither fetch a unit nor raise.
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
    """A plain copy of whole values, where they can be had."""
    # Reading them leaves the parameter with its own class, and so with that class's way to be copied; holding them,
    # with its values.
    values = parameter.data
    if is_guarded(parameter):
        # It is released still: only its values have been looked at.
        made = parameter.__class__._zeropp_own_class(values.clone(), parameter.requires_grad)  # type: ignore[attr-defined]
        memo[id(parameter)] = made
        return made  # type: ignore[no-any-return]
    copied: nn.Parameter = type(parameter).__deepcopy__(parameter, memo)
    del values
    return copied


def _flattened(values: Iterable[object]) -> Iterator[object]:
    """All values, with those of lists and dicts in place of these."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flattened(value)
        elif isinstance(value, dict):
            yield from _flattened(value.values())
        else:
            yield value


def _released(args: Iterable[object]) -> Iterator[nn.Parameter]:
    """Guarded parameters among arguments."""
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
    kwargs = kwargs or {}
    if func is torch.autograd.grad and not any(_released(args[:1])):
        return _gradients(*args, **kwargs)
    if func is torch.autograd.backward:
        _refuse_inputs(kwargs.get("inputs") or ())
    with unguarded():  # what runs below sees plain tensors, and does not come back here
        # ``type()`` names a type; with an argument it would convert values.
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
                # The compiled code would find the stand-in's NaN, and see no guard.
                break_graph(f"parameter {tag.name!r} is managed by zeropp and used outside forward and backward")
            if func in (_GET_GRAD, _SET_GRAD):
                # Gradients are told apart from values: reading one must not fetch the unit.
                return _gradient_access(func, args, kwargs, tag.name, handler)
            if func in (torch.Tensor.requires_grad_, _SET_REQUIRES_GRAD):
                trained = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
                if trained != parameter.requires_grad:
                    # Noted on this rank; all ranks compare at the next forward. The flag is set all the same.
                    handler.note_requires_grad(parameter, trained)
                return func(*args, **kwargs)
            # What is copied may be released itself: the NaN that stands for its values must not be taken for them.
            loads = func is _COPY and parameter is args[0] and not is_guarded(args[1])
            if loads and handler.take_loaded(parameter, args[1]):
                return parameter
            if handler.fetch_touched(parameter):
                touched.append(handler)
                continue
            read[id(parameter)] = _shown_between_passes(func, tag.name, parameter, handler)
        # Every released argument has been fetched by now, and has its own class and values; or its values are in
        # ``read``.
        try:
            if read:
                return show(func, _replaced(args, read), _replaced(kwargs, read))
            return func(*args, **kwargs)
        finally:
            for handler in touched:
                handler.use_ended()


def _handler(tag: _Tag) -> GuardHandler:
    """Who keeps a parameter's values."""
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
    """``torch.autograd.grad`` with respect to released parameters; see there for the arguments.

    Autograd is given the edges of the graph in place of parameters, and needs no values: hooks gather the units that
    this backward comes to. Given the parameters, it would run with the guard turned off.
    """
    inputs = tuple(inputs)
    edges = [_edge_of(each) if is_guarded(each) else each for each in inputs]
    found: tuple[Tensor | None, ...] = torch.autograd.grad(outputs, edges, **settings)
    if not materialize_grads:
        return found
    return tuple(torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True))


def _refuse_inputs(inputs: Iterable[object]) -> None:
    """Refuse parameters as ``inputs`` of a backward.

    Raises:
        RuntimeError: a parameter is among them.
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
    """The end of the graph at a parameter.

    Raises:
        RuntimeError: it has none, since it is frozen.
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
    """Gradients are not in ``.grad``: answering None would make clipping and logging silently wrong."""
    if func == _SET_GRAD and args[1] is not None:
        raise RuntimeError(
            f"the gradient of {name!r} was set, but the optimizer steps on gradients in memory of its own, which only "
            "backward fills. Edit the .grad of the parameters in optimizer.param_groups, this rank's slices, or use "
            "optimizer.clip_grad_norm_(max_norm)"
        )
    # ``grad = None`` clears, as without zeropp, where the gradient really is.
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
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f".{getattr(getattr(func, '__self__', None), '__name__', name)}"
    return str(name)


def _refusal(func: Callable[..., Any], name: str, parameter: nn.Parameter, handler: GuardHandler) -> RuntimeError:
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
    """A view of weights that every rank caches. Its views are such, too; what is computed of it is a plain tensor.

    Attributes:
        parameter_name: of the parameter in the model.
        edits: the target of edits; None if they are refused.
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


def _shown_between_passes(
    func: Callable[..., Any], name: str, parameter: nn.Parameter, handler: GuardHandler
) -> ShownWeights:
    """Whole values in the place of a released parameter.

    Raises:
        RuntimeError: they may not be read, or are not here.
    """
    values = handler.cached_values(parameter)
    if values is None:
        # Outside a pass no other rank knows of this use, and a gather would wait for them.
        raise _refusal(func, name, parameter, handler)
    if parameter.requires_grad and torch.is_grad_enabled() and func not in _UNTRACKED:
        # Scripts log norms without no_grad(). A graph may begin here; what must not be is that it ends in silence.
        values = _LookedAt.apply(values.detach().requires_grad_())  # type: ignore[no-untyped-call]
    reader = handler.readable_weights
    return _shown_as(values, name, None if reader is None else reader.edits(parameter))


def _shown_as(values: Tensor, name: str, edits: EditTarget | None) -> ShownWeights:
    found = values.as_subclass(ShownWeights)
    found.parameter_name = name
    found.edits = edits
    return found


def show(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of shown weights.

    Raises:
        RuntimeError: it would write to them, or their memory has been given back.
    """
    # All of it: to ask shown weights for their storage is a function of theirs, too.
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
        # torch would read from address 0, and end the process.
        if each.numel() and not each.untyped_storage().nbytes() and func not in METADATA:
            raise RuntimeError(
                f"{_name_of(func)} on values that were read of parameter {each.parameter_name!r} before their memory "
                "was given back, as by optimizer.offload_states(); call optimizer.reload_states() first, on every "
                "rank, or keep a copy, .clone()"
            )


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
    """The arguments that a function writes to."""
    written = [kwargs.get("out")]
    name = getattr(func, "__name__", "")
    if name in _WRITING or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True:
        # torch's operations in place write to their first argument, whatever its name.
        written += args[:1] or kwargs.values()
    return written


def _shown(values: Iterable[object]) -> Iterator[ShownWeights]:
    for each in _flattened(values):
        if isinstance(each, ShownWeights):
            yield each


def _marked(result: Any, sources: dict[int, ShownWeights]) -> Any:
    """The result, with views of shown weights among it shown as they are."""
    if isinstance(result, Tensor):
        # Also what an operation hands through as it is, as contiguous() does.
        source = sources.get(storage_id(result))
        return result if source is None else _shown_as(result, source.parameter_name, source.edits)
    if isinstance(result, list | tuple) and not hasattr(result, "_fields"):
        return type(result)(_marked(each, sources) for each in result)
    return result


def _replaced(value: Any, shown: dict[int, ShownWeights]) -> Any:
    """Arguments with values in place of released parameters."""
    if isinstance(value, dict):
        return {key: _replaced(each, shown) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, shown) for each in value)
    return shown.get(id(value), value)


# Memory off the device.

# A slice keeps its gradient, whatever has become of either, so that ``zero_grad`` may drop it.
_ANSWERED = METADATA.union(LAYOUT, (Tensor.untyped_storage, Tensor.grad.__get__, Tensor.grad.__set__, Tensor.__hash__))  # type: ignore[union-attr]


def make_unreadable(tensor: Tensor, why: str) -> None:
    """Refuse every use of a tensor; ``why`` goes on after its shape in the error."""
    # As the guard does for parameters: whoever holds the object meets it, whatever they call with it.
    set_class(tensor, _refusing(type(tensor), why))


def make_readable(tensor: Tensor) -> None:
    """Take that back."""
    set_class(tensor, getattr(type(tensor), "_zeropp_readable_class", type(tensor)))


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
    return _subclass(cls, "Unreadable", namespace)
