"""Hooks on the user's modules: they tell the engine that a module runs, and cast and watch its inputs and outputs.

A *hooked module* is one whose forward brackets uses of units. Before it runs, its units are fetched; after it, they are
released, and its outputs carry a hook that fetches them again when backward arrives. Hooks hold the engine weakly.

torch calls a module's hooks after an error, but not after Ctrl-C, or whatever else is no ``Exception``. Then modules
stay on the call stack here. The next forward of the model takes them off, as ``Engine.recover()`` does: a model that is
called while it is on the stack has been interrupted.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zeropp._compat import current_graph_task, storage_id, uncompiled, will_execute
from zeropp.order.known_orders import PhaseKey, Reach
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


# In a module's __dict__. See [Note: ownership].
OWNED_AS = "_zeropp_engine"
EXTERNAL_AS = "ds_external_parameters"
_MODULE_ATTRIBUTES = frozenset([*vars(nn.Module()), OWNED_AS, EXTERNAL_AS])


# Hooked modules, and their calls.


class BackwardReach(Enum):
    """Ways in which backward may come back to a call of a hooked module, and need its units again."""

    NEVER = "never"
    HOOKED = "hooked"  # by the outputs
    # By another forward in it: it records no graph inside a forward that does, as checkpointing runs modules first.
    AGAIN = "again"
    # It records a graph, and nothing that it returns or stores on its module could be hooked: its units are there
    # for all of backward.
    UNHOOKED = "unhooked"


@dataclass(eq=False)
class HookedModule:
    """A module with hooks.

    Attributes:
        path: qualified name.
        units: fetched for the module's forward; those of small parameters, used anywhere, aside.
        skipped: its running forward goes by without hooks. Inside a compiled region they would break its graph, and
            without units they are of use only where a pass begins.
        stored: tensors on the module that carry a hook already, of the call that made them.
        inside: modules inside it that may store such tensors, with their attributes: neither those that are hooked
            themselves nor torch's own. None until its first forward.
        begins: how the paths of modules inside this one begin; "" if it is the root.
        run_by: ``begins`` of the modules that have run this one in their forwards, though it is not inside them by its
            path.
        reentered: its last call came while a forward that it may begin was on the call stack.
    """

    path: str
    units: tuple[Unit, ...]
    skipped: bool = False
    stored: list[weakref.ref[Tensor]] = field(default_factory=list)
    # Weakly: the engine must not keep the modules that own it.
    inside: list[_Inner] | None = None
    run_by: set[str] = field(default_factory=set)
    reentered: bool = False
    begins: str = field(init=False)

    def __post_init__(self) -> None:
        self.begins = self.path and f"{self.path}."

    @property
    def with_frozen(self) -> tuple[Unit, ...]:
        """The units with frozen parameters: no gradient tells when backward is done with those."""
        return tuple(unit for unit in self.units if unit.has_frozen)

    @property
    def trainable(self) -> bool:
        """True if any unit has a trainable buffer."""
        return any(unit.trainable_buffers for unit in self.units)


@dataclass
class _Inner:
    """A module without hooks, the number of its attributes, and the names of those that are its forward's own."""

    module: weakref.ref[nn.Module]
    count: int = -1
    names: tuple[str, ...] = ()

    def look(self, values: dict[str, object]) -> tuple[str, ...]:
        """Look again which attributes there are."""
        self.count = len(values)
        self.names = tuple(name for name in values if name not in _MODULE_ATTRIBUTES)
        return self.names


class HookHandler(Protocol):
    """The engine, as hooks see it.

    Attributes:
        storages: identities of the storages of all gathered weights.
        released_storages: the same, of those that are released when a module is left.
        notes_calls: whether it wants to be told of the calls that are made.
    """

    storages: frozenset[int]
    released_storages: frozenset[int]
    notes_calls: bool

    def enter(
        self, hooked: HookedModule, training: bool, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A hooked module's forward begins; returns changed (args, kwargs) or None."""
        ...

    def leave(self, hooked: HookedModule, *, returns: BackwardReach, failed: bool) -> None:
        """A hooked module's forward is over."""
        ...

    def backward_reached(self, call: BackwardCall) -> None:
        """Backward arrives at a hooked module's outputs."""
        ...

    def backward_left(self, call: BackwardCall) -> None:
        """Every gradient with respect to a hooked module's inputs is computed."""
        ...

    def call_made(self, call: BackwardCall, outputs: list[Tensor]) -> None:
        """A call has hooked outputs, by which backward may come to it."""
        ...

    def gradient_ready(self, index: int, position: int) -> None:
        """Autograd has put a gradient into ``.grad`` of a trainable parameter: of which unit, and where in it."""
        ...


class BackwardCall:
    """One call of a hooked module, as backward will see it: a hook shared by its outputs.

    It lives as long as the graph of those. Hooks on the inputs hold it weakly: what they hold lives as long as the
    inputs' graph, and a call that knew them both ways would keep the whole graph for ever, unseen by Python's
    collector. (``register_multi_grad_hook`` does that for graphs without a backward, as checkpointing makes them.)
    """

    # One for every hooked module and forward: no dict for each. Hooks on inputs hold it weakly, which slots must allow.
    __slots__ = ("__weakref__", "_behind", "_handler", "_inputs", "_left", "_pass", "expected", "hooked", "reached")

    def __init__(self, handler: weakref.ref[HookHandler], hooked: HookedModule) -> None:
        self._handler = handler
        self.hooked = hooked
        # The backward that has reached it; a retained graph may see several.
        self.reached = -1
        self._inputs: list[Node] = []
        self._behind: list[Node] = []
        self.expected = False  # whether backwards are told of it before they come to it
        self._pass = -1  # the backward that has reached an input
        self._left = 0  # gradients of inputs that it has yet to compute

    def watch(self, inputs: list[Tensor]) -> list[RemovableHandle]:
        """Be told when backward has the gradients of all ``inputs`` that it computes."""
        # The nodes as they are now: a module that edits its input in place gives the tensor another one, and hooks
        # registered here stay with this one.
        self._inputs = [get_gradient_edge(tensor).node for tensor in inputs]
        arrived = partial(_input_arrived, weakref.ref(self))
        return [tensor.register_hook(arrived) for tensor in inputs]

    def note_outputs(self, outputs: list[Tensor]) -> None:
        """Remember where in the graph the call is, for :meth:`is_to_come`."""
        self.expected = True
        nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        # One output may come from another, whose node holds this call: a circle that nobody would collect. Nodes made
        # before all of them lead to none of them, and leaves lead nowhere.
        first = min((node._sequence_nr() for node in nodes), default=0)
        behind = [each for node in nodes for each, _ in node.next_functions if each is not None]
        self._behind = [each for each in behind if not each.next_functions or each._sequence_nr() < first]

    def is_to_come(self) -> bool:
        """Tell whether the running backward comes to this call, by the nodes behind its outputs."""
        return any(will_execute(node) for node in self._behind)

    @uncompiled
    def __call__(self, gradient: Tensor) -> None:
        """Backward has the gradient of an output.

        Raises:
            RuntimeError: it makes a graph of gradients, which would keep weights that are to be released.
        """
        # Autograd runs hooks with grad mode off, unless create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True, as grad and other transforms of torch.func run it, through a model "
                "managed by zeropp is not supported: hooks of this backward gather weights and reduce gradients, and a "
                "graph of gradients would have none. Take such penalties from a model of your own, or from finite "
                "differences"
            )
        handler = self._handler()
        if handler is not None:
            handler.backward_reached(self)

    def input_arrived(self) -> None:
        """Backward has the gradient of an input."""
        task = current_graph_task()
        # Another backward over a retained graph, which may want the gradients of other inputs. Which it will compute,
        # autograd can tell only while it runs.
        if task != self._pass:
            self._pass = task
            self._left = sum(will_execute(node) for node in self._inputs)
        self._left -= 1
        handler = self._handler()
        if self._left == 0 and handler is not None:
            handler.backward_left(self)


@uncompiled
def _input_arrived(ref: weakref.ref[BackwardCall], gradient: Tensor) -> None:
    """A hook on an input of a call."""
    if (call := ref()) is not None:
        call.input_arrived()


@uncompiled
def _gradient_ready(ref: weakref.ref[HookHandler], index: int, position: int, parameter: Tensor) -> None:
    """A hook on a parameter: its gradient is in ``.grad``."""
    if (handler := ref()) is not None:
        handler.gradient_ready(index, position)


# All hooks of a model.


class ModuleHooks:
    """All hooks of one model; one call stack, since one thread runs forward.

    Attributes:
        open_calls: how many calls of ``Engine.call_model()`` are running.
    """

    def __init__(self, handler: HookHandler) -> None:
        # Weakly, or engine and hooks would be a circle. See [Note: ownership].
        self._handler = weakref.ref(handler)
        self._handles: list[RemovableHandle] = []
        self._on_leaves: list[RemovableHandle] = []
        self._stack: list[_Frame] = []
        # Weakly: the engine must not keep the modules that own it.
        self._modules: weakref.WeakKeyDictionary[nn.Module, HookedModule] = weakref.WeakKeyDictionary()
        self._reach: dict[str, Reach] = {}
        # Uses to add once nothing runs.
        self._later: list[tuple[nn.Module, Unit]] = []
        self.open_calls = 0

    def extend(self, module: nn.Module, unit: Unit) -> None:
        """Let a module's forwards use one more unit."""
        hooked = self._modules.get(module)
        if hooked is None:
            self.install(module, HookedModule(f"<{type(module).__name__} with a parameter of {unit.name}>", (unit,)))
        elif any(frame.hooked is hooked for frame in self._stack):
            # A running forward leaves what it has entered; with one more unit it would take back a use that it never
            # made.
            self._later.append((module, unit))
        elif unit not in hooked.units:
            # In one order on every rank, since uses are collective.
            hooked.units = tuple(sorted((*hooked.units, unit), key=lambda each: each.index))
            self._reach.clear()

    def install(self, module: nn.Module, hooked: HookedModule) -> None:
        """Hook one module."""
        self._modules[module] = hooked
        self._reach.clear()
        self._handles.append(
            # First: pre-hooks of the user may read weights already.
            module.register_forward_pre_hook(self._before(hooked), prepend=True, with_kwargs=True)
        )
        self._handles.append(
            # Also after an error, or users would be counted for ever. torch calls such hooks for an Exception, not for
            # Ctrl-C.
            module.register_forward_hook(self._after(hooked), with_kwargs=True, always_call=True)
        )

    def _extend_later(self) -> None:
        later = list(self._later)
        self._later[:] = []
        for module, unit in later:
            self.extend(module, unit)

    def reach(self, key: PhaseKey) -> Reach:
        """Units gathered and modules run by forwards that begin at a kind of pass's first module, or inside it."""
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
        """The paths of the innermost modules that have a parameter, and whose forward fetches its unit."""
        found = [
            hooked.path
            for module, hooked in self._modules.items()
            # Small parameters are shown in any pass, and a pass begins at any hooked module.
            if (unit in hooked.units or not unit.hooked) and any(each is parameter for each in module.parameters())
        ]
        around = {path for path in found for other in found if other != path and f"{other}.".startswith(f"{path}.")}
        return sorted(path for path in found if path not in around and (path or len(found) == 1))

    @property
    def root(self) -> nn.Module | None:
        """The module whose hooks these are, unless it is gone."""
        return next((module for module, hooked in self._modules.items() if hooked.path == ""), None)

    def watch_gradients(self, unit: Unit, first: int = 0) -> None:
        """Tell of the gradients of a unit's trainable parameters, from position ``first`` on."""
        parameters = [parameter for buffer in unit.trainable_buffers for parameter in buffer.parameters]
        for position, parameter in enumerate(parameters[first:], first):
            # Position and index alone: a hook that knew the unit would close a circle through C++, unseen by the
            # collector.
            ready = partial(_gradient_ready, self._handler, unit.index, position)
            # A hook on the tensor would come before the gradient is in .grad, from where it is taken.
            self._handles.append(parameter.register_post_accumulate_grad_hook(ready))

    def keep(self, handle: RemovableHandle) -> None:
        """Remove another hook together with these."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget_graphs(self) -> None:
        """No graph made so far can be used any more."""
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves.clear()

    def reset(self) -> None:
        """Forget a call stack that an error has cut off."""
        self._stack.clear()

    @property
    def depth(self) -> int:
        """Number of hooked modules on the call stack."""
        return len(self._stack)

    def was_interrupted(self, hooked: HookedModule) -> bool:
        """Tell whether a forward was interrupted, from the call of a module that is about to begin.

        A module that begins a forward must not be called inside it: `_require_no_recursion` refuses that when the outer
        call ends. Inside calls by `run_as` and `Engine.call_model` it may: those see an interruption themselves.
        """
        first = int(bool(self._stack) and self._stack[0].by_function)
        begun = len(self._stack) > first and not self.open_calls
        hooked.reentered = begun and (hooked.path == "" or self._stack[first].hooked is hooked)
        return hooked.reentered

    def run_as(self, module: nn.Module, function: Callable[..., object], *args: object) -> object:
        """Call ``function`` in place of a hooked module's forward, between its hooks of this engine alone."""
        hooked = self._modules[module]
        kwargs = dict[str, object]()
        changed = self._before(hooked)(module, args, kwargs)
        self._stack[-1].by_function = True
        if isinstance(changed, tuple):
            args, kwargs = changed
        try:
            output = function(*args, **kwargs)
        except BaseException:
            # Inside the handler, as torch calls it: it sees that there is an error.
            self._after(hooked)(module, args, kwargs, None)
            raise
        return self._after(hooked)(module, args, kwargs, output)

    def _before(self, hooked: HookedModule) -> Callable[..., object]:
        # Not self: the module would keep it alive through this closure.
        ref = self._handler
        stack = self._stack

        def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            handler = ref()
            if handler is None:
                return None
            # Before there is a frame: if it raises, the hook after the module finds none, and takes nothing back.
            changed = handler.enter(hooked, module.training, args, kwargs)
            call = BackwardCall(ref, hooked) if torch.is_grad_enabled() else None
            if stack and not hooked.path.startswith(stack[-1].hooked.begins):
                hooked.run_by.add(stack[-1].hooked.begins)
            # The error that is being handled belongs to the frame: a forward may run inside an except block, and is no
            # failure then.
            stack.append(_Frame(hooked, call, sys.exc_info()[1]))
            # Gradients tell when a trained weight is done with; a frozen one needs the inputs' to say so.
            if call is not None and hooked.with_frozen:
                inputs = differentiable((args, kwargs))
                handles = call.watch(inputs)
                self._on_leaves += [h for h, tensor in zip(handles, inputs, strict=True) if tensor.is_leaf]
            return changed

        # The compiler must not look inside: gathers and streams are no part of a graph.
        opaque: Callable[..., object] = torch.compiler.disable(before)

        def before_or_skip(*arguments: object) -> object:
            # Where a pass begins, with nothing on the stack, the hook is needed even inside a compiled region.
            hooked.skipped = torch.compiler.is_compiling() and not hooked.units and bool(stack)
            return None if hooked.skipped else opaque(*arguments)

        return opaque if hooked.units else before_or_skip

    def _after(self, hooked: HookedModule) -> Callable[..., object]:
        ref = self._handler
        stack = self._stack

        def after(module: nn.Module, args: object, kwargs: object, output: object) -> object:
            handler = ref()
            # No frame: entering has failed, or a recovery has emptied the stack.
            if handler is None or not any(frame.hooked is hooked for frame in stack):
                _require_no_recursion(module, hooked)
                return None
            frame = stack.pop()
            # Modules whose hooks did not run, as after Ctrl-C. What they hold goes when the pass is recovered.
            while frame.hooked is not hooked:
                frame = stack.pop()
            failed = sys.exc_info()[1] is not frame.error
            returns = BackwardReach.NEVER
            if not failed:
                # While the values are still there. Persistent weights stay until the pass ends: only the outermost
                # module must copy those.
                output = copy_views(output, handler.released_storages if stack else handler.storages, hooked.path)
            if frame.call is None and not failed and stack and stack[0].call is not None:
                returns = BackwardReach.AGAIN
            elif frame.call is not None and not failed:
                outputs = differentiable(output)
                if hooked.inside is None:
                    hooked.inside = _find_inside(module, hooked, self._modules)
                stored = _stored_tensors(module, hooked, deep=not outputs)
                outputs += [tensor for tensor in stored if all(tensor is not other for other in outputs)]
                views = []
                for tensor in outputs:
                    handle = tensor.register_hook(frame.call)
                    # A leaf outlives the graph, and would collect the hooks of every graph before.
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
            # The outermost forward is over, and hooked modules may change.
            if self._later and not stack:
                self._extend_later()
            return output

        opaque: Callable[..., object] = torch.compiler.disable(after)

        def after_or_skip(*arguments: object) -> object:
            return None if torch.compiler.is_compiling() and hooked.skipped else opaque(*arguments)

        return opaque if hooked.units else after_or_skip


def _require_no_recursion(module: nn.Module, hooked: HookedModule) -> None:
    """Refuse the end of a forward that a call of the same module inside it has ended.

    Raises:
        RuntimeError: it is such a forward, and no error is on its way.
    """
    if hooked.reentered and sys.exc_info()[1] is None:
        raise RuntimeError(
            f"a {type(module).__name__} was called inside its own forward, and it is the module that zeropp wraps or "
            "that began this forward. Such a call looks like the next one after Ctrl-C, and has ended the forward "
            "around it. Call self.forward(...) there in place of self(...)"
        )


@dataclass
class _Frame:
    """A hooked module on the call stack."""

    hooked: HookedModule
    call: BackwardCall | None
    # Being handled when the module was entered.
    error: BaseException | None
    # Another function runs in place of the module's forward.
    by_function: bool = False


# Tensors that a backward may begin at.


def _stored_tensors(module: nn.Module, hooked: HookedModule, *, deep: bool) -> list[Tensor]:
    """Differentiable tensors that a forward has put on its module: a loss, a penalty on weights.

    Args:
        module: whose forward it was.
        hooked: what the hooks know of it.
        deep: look into any object, which takes its time; there is no output that backward could come by.
    """
    kinds = object if deep else (Tensor, list, tuple, dict)
    values = [v for name, v in vars(module).items() if name not in _MODULE_ATTRIBUTES and isinstance(v, kinds)]
    found = [tensor for tensor in differentiable(values) if deep or not tensor.is_leaf]
    for each in hooked.inside or ():
        if (inner := each.module()) is not None:
            attributes = inner.__dict__
            for name in each.names if each.count == len(attributes) else each.look(attributes):
                if isinstance(value := attributes.get(name), (Tensor, list, tuple, dict)):
                    found += [tensor for tensor in differentiable(value) if not tensor.is_leaf]
    # What stays on the module from one forward to the next is hooked once, by the call that made it. Weakly: the graph
    # of a loss must go when the user drops it.
    known = {id(tensor) for ref in hooked.stored if (tensor := ref()) is not None}
    hooked.stored = [weakref.ref(tensor) for tensor in found if not tensor.is_leaf]
    return [tensor for tensor in found if id(tensor) not in known]


def _find_inside(module: nn.Module, hooked: HookedModule, others: Container[nn.Module]) -> list[_Inner]:
    """Modules below, none of ``others``, that may store what a backward begins at."""
    inner = [each for each in module.modules() if each is not module and each not in others] if hooked.units else []
    # Layers of torch store nothing, and there are many.
    return [_Inner(weakref.ref(each)) for each in inner if not type(each).__module__.startswith("torch.nn.")]


def _made_bases(views: list[Tensor], inputs: object) -> list[Tensor]:
    """Tensors made in a module of which these outputs are views.

    An activation in place, ``relu_``, on such a view gives it a graph that goes from the base on, and passes by the
    node where the view was made. ``torch.nn.Linear`` returns a view where its input has three dimensions.
    """
    given = {id(each) for tensor in tensors_in(inputs) for each in (tensor, tensor._base)}
    bases = [base for view in views if (base := view._base) is not None and base.grad_fn is not None]
    return [base for base in bases if id(base) not in given]
