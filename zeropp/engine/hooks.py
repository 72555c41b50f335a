"""Hooks on the user's modules: they report module calls to the engine, and cast and watch inputs and outputs.

A *hooked module* uses units in its forward. The hook before the module gathers its units. The hook after the module
releases them, and hooks the module's outputs, so that backward gathers the units again when it reaches the outputs.
Hooks refer to the engine weakly.

torch calls the hook after a module when the module raises an ``Exception``, but not after Ctrl-C or another exception
that is no ``Exception``. Then modules stay on the call stack of this file. The next forward of the model clears the
stack, and so does ``Engine.recover()``: a model that is called while it is on the stack has been interrupted.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zeropp._compat import current_graph_task, storage_id, uncompiled, unguarded, will_execute
from zeropp.order.known_orders import PhaseKey, Reach
from zeropp.order.reductions import Arrivals
from zeropp.params.unit import Unit

__all__ = [
    "EXTERNAL_AS",
    "OWNED_AS",
    "BackwardCall",
    "BackwardReach",
    "HookHandler",
    "HookedModule",
    "ModuleHooks",
    "cast_floating",
    "copy_views",
    "differentiable",
    "map_tensors",
    "tensors_in",
]


_T = TypeVar("_T")


def differentiable(value: object) -> list[Tensor]:
    """Return the tensors that require grad in tuples, lists, dicts, dataclasses and plain objects, each once."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def tensors_in(value: object) -> list[Tensor]:
    """Return all tensors in tuples, lists, dicts, dataclasses and plain objects, each once."""
    return [value] if isinstance(value, Tensor) else list(_walk(value, set()))


def _walk(value: object, seen: set[int]) -> Iterator[Tensor]:
    # Modules are skipped: an output that refers to a module would lead to all parameters of that module.
    if value is None or isinstance(value, (int, float, str, bytes, type, nn.Module)) or id(value) in seen:
        return
    # Structures may contain themselves. Identities are unique, because the caller keeps all of these objects alive.
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
        # Other objects are searched, too: model libraries return classes of their own, whose tensors need hooks.
        names = [name for cls in type(value).__mro__ for name in _slots(cls)]
        for name in dict.fromkeys([*names, *getattr(value, "__dict__", {})]):
            yield from _walk(getattr(value, name, None), seen)


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def cast_floating(value: _T, dtype: torch.dtype) -> _T:
    """Return the same structure with its floating-point tensors in ``dtype``; see :func:`map_tensors`."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def cast_inputs(
    args: tuple[object, ...], kwargs: dict[str, object], dtype: torch.dtype | None
) -> tuple[tuple[object, ...], dict[str, object]] | None:
    """Return a module's inputs with floating-point tensors in ``dtype``; None to leave them as they are."""
    return None if dtype is None else (cast_floating(args, dtype), cast_floating(kwargs, dtype))


def map_tensors(value: _T, change: Callable[[Tensor], Tensor]) -> _T:
    """Return the same structure with ``change(tensor)`` in place of each tensor.

    Tuples, lists, dicts and dataclasses are searched. A container with a tensor that changes is copied. All other
    objects, and containers without a change, are returned as they are.

    Args:
        value: tensor or structure.
        change: function that returns a tensor's replacement, or the tensor itself.
    """
    changed: Any = value
    if isinstance(value, Tensor):
        changed = change(value)
    elif isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        # Without a change the container itself is returned, because the module may have to fill it for its caller.
        if any(new is not old for new, old in zip(items, value, strict=True)):
            changed = _like(value, items)
    elif isinstance(value, MutableMapping):
        replaced = {key: map_tensors(item, change) for key, item in value.items()}
        if any(replaced[key] is not value[key] for key in replaced):
            changed = copy.copy(value)
            for key, item in replaced.items():
                # Assigned one by one, because a mapping may have no update(). copy.copy keeps attributes of the class.
                changed[key] = item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # A field without init may not be set.
            old = getattr(value, field.name, None)
            new = map_tensors(old, change)
            if new is not old:
                changed = copy.copy(value) if changed is value else changed
                # Bypasses the __setattr__ of the class, so that frozen dataclasses work, too.
                object.__setattr__(changed, field.name, new)
    return changed  # type: ignore[no-any-return]


def _like(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """Return a sequence of the same class with other items."""
    if isinstance(value, list):
        changed = copy.copy(value)
        changed[:] = items
        return changed
    # A named tuple's constructor takes its fields one by one; its _make takes a list.
    make = getattr(type(value), "_make", type(value))
    try:
        return make(items)
    except TypeError:
        # The constructor of this class takes other arguments.
        return tuple.__new__(type(value), items)


def copy_views(output: object, storages: Container[int], where: str) -> object:
    """Return a module's output with copies of all tensors that lie in one of ``storages``.

    Args:
        output: output of the module.
        storages: identities of the storages of gathered weights.
        where: path of the module.

    Returns:
        The output itself if no tensor lies in these storages.

    Raises:
        RuntimeError: a view of a weight is inside an object that cannot be rebuilt.
    """
    if isinstance(output, Tensor):
        return output.clone() if _lies_in(output, storages) else output
    if not any([_lies_in(tensor, storages) for tensor in tensors_in(output)]):
        return output
    copied = map_tensors(output, lambda tensor: tensor.clone() if _lies_in(tensor, storages) else tensor)
    # Plain objects are searched but not rebuilt, because the arguments of their constructors are unknown.
    if any([_lies_in(tensor, storages) for tensor in tensors_in(copied)]):
        raise RuntimeError(
            f"module {where or 'at the root'!r} returns a weight, or a view of one, inside a {type(output).__name__}, "
            "and the weight's memory is freed when the module ends; return a copy of it, weight.clone()"
        )
    return copied


def _lies_in(tensor: Tensor, storages: Container[int]) -> bool:
    """Return True if a tensor lies in one of these storages."""
    try:
        return storage_id(tensor) in storages
    except (NotImplementedError, RuntimeError):
        # A sparse tensor, or one inside a transform of torch.func: it has no storage, so it is no view of a weight.
        return False


# Names of attributes in a module's __dict__. See [Note: ownership].
OWNED_AS = "_zeropp_engine"
EXTERNAL_AS = "ds_external_parameters"
_MODULE_ATTRIBUTES = frozenset([*vars(nn.Module()), OWNED_AS, EXTERNAL_AS])
# Types of attributes in which a forward may store tensors.
_SEARCHED_TYPES = (Tensor, list, tuple, dict)


# Hooked modules, and their calls.


class BackwardReach(Enum):
    """Ways in which backward may reach a call of a hooked module again, and need its units."""

    NEVER = "never"
    HOOKED = "hooked"  # by the hooks on its outputs
    # By running it again: the call records no graph inside a forward that records one, as with checkpointing.
    AGAIN = "again"
    # The call records a graph, but no tensor that it returns or stores on its module could be hooked. Its units stay
    # gathered during all of backward.
    UNHOOKED = "unhooked"


@dataclass(eq=False)
class HookedModule:
    """A hooked module of the model.

    Attributes:
        path: qualified name of the module in the model.
        units: units that the module's forward gathers. Units of small parameters that any module may use are left out.
        skipped: True if the hooks skip the running forward, because it is in a compiled region and gathers nothing. The
            hooks would break the compiled graph; without units they are needed only where a pass begins.
        stored: tensors stored on the module that have a hook already, of the call that made them.
        inside: this module, and modules inside it that may store such tensors, without hooked ones and torch's own;
            None until the first forward.
        begins: prefix of the paths of modules inside this one; "" for the root.
        run_by: prefixes ``begins`` of modules that have run this one in their forwards, although its path is not
            inside theirs.
        reentered: True if the module was last called while a forward that began at it, or any if it is the root, was
            on the call stack.
    """

    path: str
    units: tuple[Unit, ...]
    skipped: bool = False
    stored: list[weakref.ref[Tensor]] = field(default_factory=list)
    # Weak references, because the modules own the engine.
    inside: list[_Inner] | None = None
    run_by: set[str] = field(default_factory=set)
    reentered: bool = False
    begins: str = field(init=False)

    def __post_init__(self) -> None:
        self.begins = self.path and f"{self.path}."

    @property
    def has_frozen(self) -> bool:
        """True if a unit has frozen parameters, for which no gradient shows when backward is done with the weights."""
        for unit in self.units:  # noqa: SIM110  any() would make a list or a generator at every call
            if unit.has_frozen:
                return True
        return False

    @property
    def trainable(self) -> bool:
        """True if any unit has a trainable buffer."""
        return any(unit.trainable_buffers for unit in self.units)


@dataclass
class _Inner:
    """A module that may store tensors, the number of its attributes, and the names of those set by its own code."""

    module: weakref.ref[nn.Module]
    count: int = -1
    names: tuple[str, ...] = ()

    def look(self, values: dict[str, object]) -> tuple[str, ...]:
        """Read again the attributes of the module."""
        self.count = len(values)
        self.names = tuple(name for name in values if name not in _MODULE_ATTRIBUTES)
        return self.names


class HookHandler(Protocol):
    """Interface of the engine: methods that hooks call.

    Attributes:
        storages: identities of the storages of all gathered weights.
        released_storages: the part of ``storages`` whose memory is freed when modules end.
        notes_calls: True if :meth:`call_made` is to be called.
    """

    storages: frozenset[int]
    released_storages: frozenset[int]
    notes_calls: bool

    def enter(
        self, hooked: HookedModule, training: bool, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Begin a hooked module's forward; return the changed (args, kwargs), or None."""
        ...

    def leave(self, hooked: HookedModule, *, returns: BackwardReach, failed: bool) -> None:
        """End a hooked module's forward.

        Args:
            hooked: hooked module.
            returns: way in which backward may reach the call.
            failed: True if the forward raised an error.
        """
        ...

    def backward_reached(self, call: BackwardCall) -> None:
        """Called when backward reaches an output of a hooked module's call."""
        ...

    def backward_left(self, call: BackwardCall) -> None:
        """Called when all gradients of the inputs of a hooked module's call are computed."""
        ...

    def call_made(self, call: BackwardCall, outputs: list[Tensor]) -> None:
        """Called when a call has hooked outputs, through which backward may reach the call."""
        ...

    def gradient_ready(self, index: int, position: int, *, alone: bool) -> None:
        """Called when autograd has put a gradient into ``.grad`` of a trainable parameter.

        Args:
            index: index of the unit.
            position: position of the parameter among the unit's trainable ones.
            alone: True if the parameter has no other hook of this kind.
        """
        ...


class BackwardCall:
    """One call of a hooked module. The object is the hook on all outputs of the call.

    The outputs' graph keeps the object alive. Hooks on the inputs refer to it weakly: with a strong reference, the
    inputs' graph and the object would keep each other alive for ever, and Python's garbage collector cannot see such a
    cycle. (``register_multi_grad_hook`` makes such a cycle if no backward follows, as with checkpointing.)
    """

    # Slots save a dict for each call of each hooked module. Hooks on inputs need __weakref__.
    __slots__ = ("__weakref__", "_behind", "_handler", "_inputs", "_left", "_pass", "expected", "hooked", "reached")

    def __init__(self, handler: weakref.ref[HookHandler], hooked: HookedModule) -> None:
        self._handler = handler
        self.hooked = hooked
        # Number of the backward that has reached the call. Several backwards may go through a retained graph.
        self.reached = -1
        self._inputs: Sequence[Node] = ()
        self._behind: Sequence[Node] = ()
        self.expected = False  # True if the engine counts the call as one that backward may reach
        self._pass = -1  # autograd's number of the backward that has reached an input
        self._left = 0  # number of inputs whose gradients that backward has yet to compute

    def watch(self, inputs: list[Tensor]) -> list[RemovableHandle]:
        """Call ``HookHandler.backward_left`` when backward has computed its gradients of all ``inputs``."""
        # The nodes are stored now: an edit in place gives a tensor a new node, and hooks stay with the old one.
        self._inputs = [get_gradient_edge(tensor).node for tensor in inputs]
        arrived = partial(_input_arrived, weakref.ref(self))
        return [tensor.register_hook(arrived) for tensor in inputs]

    def note_outputs(self, outputs: list[Tensor]) -> None:
        """Store the graph nodes behind the outputs, for :meth:`is_to_come`."""
        self.expected = True
        nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        # One output may be computed from another, whose node holds this call. Storing that node would make a cycle that
        # is never collected. Nodes older than all outputs do not lead to them, and leaves lead to no other node.
        first = min([node._sequence_nr() for node in nodes], default=0)
        behind: list[Node] = []
        for node in nodes:
            for each, _ in node.next_functions:
                if each is not None and (not each.next_functions or each._sequence_nr() < first):
                    behind.append(each)
        self._behind = behind

    def is_to_come(self) -> bool:
        """Return True if the running backward will reach this call, as autograd tells for nodes behind its outputs."""
        return any(map(will_execute, self._behind))

    @uncompiled
    def __call__(self, gradient: Tensor) -> None:
        """Handle the gradient of an output: backward has reached the call.

        Raises:
            RuntimeError: backward runs with ``create_graph=True``, and its graph would refer to released weights.
        """
        # Autograd runs hooks with grad mode off, except with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True, as grad and other transforms of torch.func run it, through a model "
                "managed by zeropp is not supported: hooks of this backward gather weights and reduce gradients, but "
                "the graph of gradients that it makes would have no such hooks. Compute gradient penalties with a "
                "model that zeropp does not manage, or with finite differences"
            )
        handler = self._handler()
        if handler is not None:
            handler.backward_reached(self)

    def input_arrived(self) -> None:
        """Count the gradient of an input; the last one ends the call's backward."""
        task = current_graph_task()
        # This is the first backward, or another one over a retained graph, which may compute the gradients of other
        # inputs. Autograd tells which ones only while that backward runs.
        if task != self._pass:
            self._pass = task
            self._left = sum(will_execute(node) for node in self._inputs)
        self._left -= 1
        handler = self._handler()
        if self._left == 0 and handler is not None:
            handler.backward_left(self)


@uncompiled
def _input_arrived(ref: weakref.ref[BackwardCall], gradient: Tensor) -> None:
    """Hook on an input of a call."""
    if (call := ref()) is not None:
        call.input_arrived()


@uncompiled
def _gradient_ready(ref: weakref.ref[HookHandler], index: int, position: int, parameter: Tensor) -> None:
    """Hook on a parameter, called when its gradient is in ``.grad``."""
    with unguarded():
        arrived = parameter.grad is not None
        alone = len(parameter._post_accumulate_grad_hooks) == 1
    # Autograd also calls the hook of a parameter that was frozen after the forward, without a gradient.
    if arrived and (handler := ref()) is not None:
        handler.gradient_ready(index, position, alone=alone)


# The hooks of a whole model.


class ModuleHooks:
    """All hooks of one model, and the call stack of hooked modules. Only one thread runs forwards.

    Attributes:
        stack: running calls of hooked modules, the outermost first.
        open_calls: number of running calls of ``Engine.call_model()``.
    """

    def __init__(self, handler: HookHandler) -> None:
        # A weak reference, because the engine owns this object. See [Note: ownership].
        self._handler = weakref.ref(handler)
        self._handles: list[RemovableHandle] = []
        self._on_leaves: list[RemovableHandle] = []
        self.stack: list[_Frame] = []
        # Weak references, because the modules own the engine.
        self._modules: weakref.WeakKeyDictionary[nn.Module, HookedModule] = weakref.WeakKeyDictionary()
        self._reach: dict[str, Reach] = {}
        # Calls of ``extend`` that wait for the end of the outermost forward.
        self._later: list[tuple[nn.Module, Unit]] = []
        self.open_calls = 0

    def extend(self, module: nn.Module, unit: Unit) -> None:
        """Let the forwards of a module gather one more unit."""
        hooked = self._modules.get(module)
        if hooked is None:
            self.install(module, HookedModule(f"<{type(module).__name__} with a parameter of {unit.name}>", (unit,)))
        elif any(frame.hooked is hooked for frame in self.stack):
            # Wait for the end of the running forward: its hook would end a use of the unit that it never began.
            self._later.append((module, unit))
        elif unit not in hooked.units:
            # Sorted, because uses are collective and need the same order on every rank.
            hooked.units = tuple(sorted((*hooked.units, unit), key=lambda each: each.index))
            self._reach.clear()

    def install(self, module: nn.Module, hooked: HookedModule) -> None:
        """Register the hooks on one module."""
        self._modules[module] = hooked
        self._reach.clear()
        self._handles.append(
            # First of all pre-hooks, because pre-hooks of the user may read weights.
            module.register_forward_pre_hook(self._before(hooked), prepend=True, with_kwargs=True)
        )
        self._handles.append(
            # always_call: also after an Exception, or the units would stay in use for ever. Not called after Ctrl-C.
            module.register_forward_hook(self._after(hooked), with_kwargs=True, always_call=True)
        )

    def _extend_later(self) -> None:
        """Carry out the calls of ``extend`` that had to wait."""
        later = list(self._later)
        self._later[:] = []
        for module, unit in later:
            self.extend(module, unit)

    def reach(self, key: PhaseKey) -> Reach:
        """Return the units and modules that a kind of forward may use, in its first module and inside it."""
        start = str(key[1])
        if start not in self._reach:
            units = set[int]()
            modules = set[str]()
            gathered = dict[str, set[int]]()
            for hooked in self._modules.values():
                gathered[hooked.path] = {unit.index for unit in hooked.units if not unit.persistent}
            for path, own in gathered.items():
                if start == "" or f"{path}.".startswith(f"{start}."):
                    units |= own
                    names = path.split(".") if path else []
                    around = (gathered.get(".".join(names[:count]), set[int]()) for count in range(len(names)))
                    if own.difference(*around):
                        modules.add(path)
            self._reach[start] = Reach(frozenset(units), frozenset(modules))
        return self._reach[start]

    def fetching(self, parameter: nn.Parameter, unit: Unit) -> list[str]:
        """Return the paths of the innermost modules that have a parameter and whose forward gathers its unit."""
        found = [
            hooked.path
            for module, hooked in self._modules.items()
            # A unit without hooks (small parameters) is unsharded in any pass, and any hooked module begins a pass.
            if (unit in hooked.units or not unit.hooked) and any(each is parameter for each in module.parameters())
        ]
        around = {path for path in found for other in found if other != path and f"{other}.".startswith(f"{path}.")}
        return sorted(path for path in found if path not in around and (path or len(found) == 1))

    @property
    def root(self) -> nn.Module | None:
        """The model itself; None if it was deleted."""
        return next((module for module, hooked in self._modules.items() if hooked.path == ""), None)

    def watch_gradients(self, unit: Unit, arrivals: Arrivals) -> None:
        """Hook a unit's trainable parameters to report their gradients."""
        parameters = [parameter for buffer in unit.trainable_buffers for parameter in buffer.parameters]
        # A hook stores numbers only. A reference to the unit would make a cycle through C++ objects, which the garbage
        # collector cannot see.
        arrivals.watch(unit.index, parameters, partial(partial, _gradient_ready, self._handler, unit.index))

    def keep(self, handle: RemovableHandle) -> None:
        """Remove this hook together with the engine's own hooks."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget_graphs(self) -> None:
        """Remove hooks on leaf tensors, because no backward may go through the graphs made so far."""
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves.clear()

    def reset(self) -> None:
        """Clear the call stack after an error."""
        self.stack.clear()

    def was_interrupted(self, hooked: HookedModule) -> bool:
        """Return True if the call of this module shows that an earlier forward was interrupted, as by Ctrl-C.

        So it is if the module began the open forward, or is the root. A module that begins a forward must not be called
        inside it; `_require_no_recursion` raises then. Inside `run_as` and `Engine.call_model` such calls are allowed,
        because these two notice an interruption themselves.

        Args:
            hooked: module whose call begins.
        """
        first = int(bool(self.stack) and self.stack[0].by_function)
        begun = len(self.stack) > first and not self.open_calls
        hooked.reentered = begun and (hooked.path == "" or self.stack[first].hooked is hooked)
        return hooked.reentered

    def run_as(self, module: nn.Module, function: Callable[..., object], *args: object) -> object:
        """Run this engine's hooks of a module around ``function``, which replaces the module's forward."""
        hooked = self._modules[module]
        kwargs = dict[str, object]()
        changed = self._before(hooked)(module, args, kwargs)
        self.stack[-1].by_function = True
        if isinstance(changed, tuple):
            args, kwargs = changed
        try:
            output = function(*args, **kwargs)
        except BaseException:
            # Inside the except block, where the hook finds the error by sys.exc_info(), as when torch calls it.
            self._after(hooked)(module, args, kwargs, None)
            raise
        return self._after(hooked)(module, args, kwargs, output)

    def _before(self, hooked: HookedModule) -> Callable[..., object]:
        # The closure must not refer to ``self``, because the module owns the closure.
        ref = self._handler
        stack = self.stack

        def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            handler = ref()
            if handler is None:
                return None
            # Before the frame is pushed: if this raises, the hook after the module finds no frame, and ends no use.
            changed = handler.enter(hooked, module.training, args, kwargs)
            call = BackwardCall(ref, hooked) if torch.is_grad_enabled() else None
            if stack and not hooked.path.startswith(stack[-1].hooked.begins):
                hooked.run_by.add(stack[-1].hooked.begins)
            # Store the error that is being handled already: a forward inside an except block has not failed itself.
            stack.append(_Frame(hooked, call, sys.exc_info()[1]))
            # For frozen weights, the gradients of the inputs show when backward is done with them.
            if call is not None and hooked.has_frozen:
                inputs = differentiable((args, kwargs))
                handles = call.watch(inputs)
                self._on_leaves += [h for h, tensor in zip(handles, inputs, strict=True) if tensor.is_leaf]
            return changed

        # torch.compile must not trace the hook: gathers and streams are no part of a graph.
        opaque: Callable[..., object] = uncompiled(before)

        def before_or_skip(*arguments: object) -> object:
            # If the stack is empty, a pass begins here, and the hook is needed even in a compiled region.
            hooked.skipped = torch.compiler.is_compiling() and not hooked.units and bool(stack)
            return None if hooked.skipped else opaque(*arguments)

        return opaque if hooked.units else before_or_skip

    def _after(self, hooked: HookedModule) -> Callable[..., object]:
        ref = self._handler
        stack = self.stack

        def after(module: nn.Module, args: object, kwargs: object, output: object) -> object:
            handler = ref()
            # There is no frame if the hook before the module failed, or if the pass was given up.
            if handler is None or not _is_on(stack, hooked):
                _require_no_recursion(module, hooked)
                return None
            frame = stack.pop()
            # Drop frames of modules whose hooks did not run, as after Ctrl-C. Their units are released in recover().
            while frame.hooked is not hooked:
                frame = stack.pop()
            failed = sys.exc_info()[1] is not frame.error
            returns = BackwardReach.NEVER
            if not failed:
                # Copied now, because leave() frees the memory of weights. Persistent weights stay until the pass ends,
                # so only the outermost module copies views of them.
                output = copy_views(output, handler.released_storages if stack else handler.storages, hooked.path)
            if frame.call is None and not failed and stack and stack[0].call is not None:
                returns = BackwardReach.AGAIN
            elif frame.call is not None and not failed:
                outputs = differentiable(output)
                if hooked.inside is None:
                    hooked.inside = _find_inside(module, hooked, self._modules)
                for tensor in _stored_tensors(module, hooked, deep=not outputs):
                    if all([tensor is not other for other in outputs]):
                        outputs.append(tensor)
                views = []
                for tensor in outputs:
                    handle = tensor.register_hook(frame.call)
                    # A leaf outlives the graph, so its hooks are removed later: see ``forget_graphs``.
                    if tensor.is_leaf:
                        self._on_leaves.append(handle)
                    elif tensor._is_view():
                        views.append(tensor)
                if views:
                    bases = _made_bases(views, (args, kwargs))
                    for tensor in bases:
                        tensor.register_hook(frame.call)
                    outputs += bases
                if outputs:
                    if handler.notes_calls:
                        handler.call_made(frame.call, outputs)
                    returns = BackwardReach.HOOKED
                elif hooked.trainable or differentiable((args, kwargs)):
                    returns = BackwardReach.UNHOOKED
            handler.leave(hooked, returns=returns, failed=failed)
            # The outermost forward is over, so hooked modules may get more units now.
            if self._later and not stack:
                self._extend_later()
            return output

        opaque: Callable[..., object] = uncompiled(after)

        def after_or_skip(*arguments: object) -> object:
            return None if torch.compiler.is_compiling() and hooked.skipped else opaque(*arguments)

        return opaque if hooked.units else after_or_skip


def _require_no_recursion(module: nn.Module, hooked: HookedModule) -> None:
    """Raise at the end of a forward that was given up because its module was called again inside it.

    Args:
        module: module whose forward ends.
        hooked: its hooked module.

    Raises:
        RuntimeError: the forward was given up, and no other error is being handled.
    """
    if hooked.reentered and sys.exc_info()[1] is None:
        raise RuntimeError(
            f"a {type(module).__name__} was called inside its own forward, and it is the module that zeropp wraps or "
            "that began this forward. zeropp cannot tell such a call from the first call after Ctrl-C, so it has ended "
            "the outer forward. Call self.forward(...) there in place of self(...)"
        )


@dataclass(slots=True)
class _Frame:
    """A hooked module on the call stack, and its call, if gradients are enabled."""

    hooked: HookedModule
    call: BackwardCall | None
    # Exception that was already being handled when the module was entered.
    error: BaseException | None
    # True if another function runs in place of the module's forward.
    by_function: bool = False


def _is_on(stack: Sequence[_Frame], hooked: HookedModule) -> bool:
    """Return True if a call of a hooked module is running."""
    if stack and stack[-1].hooked is hooked:
        return True
    return any([frame.hooked is hooked for frame in stack])


# Tensors at which a backward may begin.


def _stored_tensors(module: nn.Module, hooked: HookedModule, *, deep: bool) -> list[Tensor]:
    """Return the differentiable tensors that a forward has stored on its module: a loss or a penalty, for example.

    Args:
        module: module whose forward has ended.
        hooked: its hooked module.
        deep: True to search objects of any class. This is slow, and needed only if there is no output to hook.
    """
    found = []
    if deep:
        values = [value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES]
        found = differentiable(values)
    for each in hooked.inside or ():
        if (inner := each.module()) is not None:
            attributes = inner.__dict__
            for name in each.names if each.count == len(attributes) else each.look(attributes):
                value = attributes.get(name)
                if isinstance(value, _SEARCHED_TYPES) and not (deep and inner is module):
                    found += [tensor for tensor in differentiable(value) if not tensor.is_leaf]
    if not (found or hooked.stored):
        return found
    # A tensor that stays on the module over several forwards is hooked once, by the call that made it. The references
    # are weak, so that a graph is freed when the user drops its loss.
    known = {id(tensor) for ref in hooked.stored if (tensor := ref()) is not None}
    hooked.stored = [weakref.ref(tensor) for tensor in found if not tensor.is_leaf]
    return [tensor for tensor in found if id(tensor) not in known]


def _find_inside(module: nn.Module, hooked: HookedModule, others: Container[nn.Module]) -> list[_Inner]:
    """Return a module and the modules inside it, except those in ``others``, that may store tensors on themselves."""
    inner = [each for each in module.modules() if each is not module and each not in others] if hooked.units else []
    # torch's own layers store no tensors, and there are many of them.
    own = [each for each in inner if not type(each).__module__.startswith("torch.nn.")]
    return [_Inner(weakref.ref(each)) for each in (module, *own)]


def _made_bases(views: list[Tensor], inputs: object) -> list[Tensor]:
    """Return the tensors, made in a module, whose views are outputs of the module.

    An operation in place on such a view, ``relu_``, for example, gives the view a new graph that goes through the base
    and not through the node of the view. So the base needs a hook, too. ``torch.nn.Linear`` returns such a view for
    inputs with three dimensions.
    """
    given = {id(each) for tensor in tensors_in(inputs) for each in (tensor, tensor._base)}
    bases = [base for view in views if (base := view._base) is not None and base.grad_fn is not None]
    return [base for base in bases if id(base) not in given]
