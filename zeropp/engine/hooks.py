"""Hooks on the user's modules: where the model's own running meets the engine.

A *site* is a module whose forward brackets uses of units. Before it runs, its units are fetched; after it, they are
released, and its outputs carry a hook that fetches them again when backward arrives. Hooks hold the engine weakly.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from zeropp._compat import current_graph_task, will_execute
from zeropp.engine.tensors import copy_views, differentiable
from zeropp.order.orders import PhaseKey
from zeropp.params.unit import Unit

__all__ = ["OWNED_AS", "BackwardCall", "HookHandler", "HookedModule", "ModuleHooks", "Return"]


class Return(Enum):
    """How backward may come back to a call of a site, and need its units again."""

    NEVER = "never"
    ANNOUNCED = "announced"  # by the outputs, or by another forward in it: checkpointing runs one again
    UNANNOUNCED = "unannounced"


@dataclass(eq=False)
class HookedModule:
    """A module with hooks.

    Attributes:
        path: qualified name.
        units: fetched for the module's forward, persistent ones aside.
        skipped: its running forward goes by without hooks. Inside a compiled region they would break its graph, and
            without units they are of use only where a pass begins.
        stored: tensors on the module that carry a hook already, of the call that made them.
    """

    path: str
    units: tuple[Unit, ...]
    skipped: bool = False
    stored: list[weakref.ref[Tensor]] = field(default_factory=list)

    @property
    def frozen(self) -> tuple[Unit, ...]:
        """Of the units, those with frozen values, which no gradient announces as done with."""
        return tuple(unit for unit in self.units if unit.frozen)

    @property
    def trainable(self) -> bool:
        """Whether any unit has gradients."""
        return any(unit.trainable_buffers for unit in self.units)


class HookHandler(Protocol):
    """What hooks tell: the engine, seen from here.

    Attributes:
        storages: identities of the storages of all gathered weights.
        passing: of those that are released when a module is left.
    """

    storages: frozenset[int]
    passing: frozenset[int]

    def enter(self, site: HookedModule, training: bool, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """A site's forward begins; returns changed (args, kwargs) or None."""
        ...

    def leave(self, site: HookedModule, *, returns: Return, failed: bool) -> None:
        """A site's forward is over."""
        ...

    def backward_reached(self, call: BackwardCall) -> None:
        """Backward arrives at a site's outputs."""
        ...

    def backward_left(self, call: BackwardCall) -> None:
        """Every gradient with respect to a site's inputs is computed."""
        ...

    def gradient_ready(self, index: int, position: int) -> None:
        """Autograd has put a gradient into ``.grad`` of a trainable parameter: of which unit, and where in it."""
        ...


class BackwardCall:
    """One call of a site, as backward will see it: a hook shared by its outputs.

    It lives as long as the graph of those. Hooks on the inputs hold it weakly: what they hold lives as long as the
    inputs' graph, and a call that knew them both ways would keep the whole graph for ever, unseen by Python's
    collector. (``register_multi_grad_hook`` does that for graphs without a backward, as checkpointing makes them.)
    """

    __slots__ = ("__weakref__", "_driver", "_inputs", "_left", "_pass", "reached", "site")

    def __init__(self, driver: weakref.ref[HookHandler], site: HookedModule) -> None:
        self._driver = driver
        self.site = site
        self.reached = -1  # the backward that has reached it; a retained graph may see several
        self._inputs: list[Node] = []
        self._pass = -1  # the backward that has reached an input
        self._left = 0  # gradients of inputs that it has yet to compute

    def watch(self, inputs: list[Tensor]) -> list[RemovableHandle]:
        """Be told when backward has the gradients of all ``inputs`` that it computes."""
        self._inputs = [get_gradient_edge(tensor).node for tensor in inputs]
        ref = weakref.ref(self)

        def arrived(gradient: Tensor) -> None:
            call = ref()
            if call is not None:
                call._input_arrived()

        return [tensor.register_hook(arrived) for tensor in inputs]

    def __call__(self, gradient: Tensor) -> None:
        """Backward has the gradient of an output.

        Raises:
            RuntimeError: it makes a graph of gradients, which would keep weights that are to be released.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True through a model managed by zeropp is not supported: a graph of its "
                "gradients would need weights that are released. Take such penalties from a model of your own, or from "
                "finite differences"
            )
        driver = self._driver()
        if driver is not None:
            driver.backward_reached(self)

    def _input_arrived(self) -> None:
        task = current_graph_task()
        if task != self._pass:
            self._pass, self._left = task, sum(will_execute(node) for node in self._inputs)
        self._left -= 1
        driver = self._driver()
        if self._left == 0 and driver is not None:
            driver.backward_left(self)


OWNED_AS = "_zeropp_engine"  # in a module's __dict__, see [Note: ownership]
_MODULE_ATTRIBUTES = frozenset([*vars(nn.Module()), OWNED_AS])


def _stored_tensors(module: nn.Module, site: HookedModule, *, deep: bool) -> list[Tensor]:
    """Differentiable tensors that a forward has put on its module: a loss, a penalty on weights.

    Args:
        module: whose forward it was.
        site: of the module.
        deep: look into any object, which takes its time; there is no output that backward could come by.
    """
    kinds = object if deep else (Tensor, list, tuple, dict)
    values = [v for name, v in vars(module).items() if name not in _MODULE_ATTRIBUTES and isinstance(v, kinds)]
    found = [tensor for tensor in differentiable(values) if deep or not tensor.is_leaf]
    known = {id(tensor) for ref in site.stored if (tensor := ref()) is not None}
    site.stored = [weakref.ref(tensor) for tensor in found if not tensor.is_leaf]
    return [tensor for tensor in found if id(tensor) not in known]


@dataclass
class _Frame:
    """A site on the call stack."""

    site: HookedModule
    call: BackwardCall | None
    error: BaseException | None  # being handled when the site was entered


class ModuleHooks:
    """All hooks of one model; one call stack, since one thread runs forward."""

    def __init__(self, driver: HookHandler) -> None:
        self._driver = weakref.ref(driver)
        self._handles: list[RemovableHandle] = []
        self._on_leaves: list[RemovableHandle] = []
        self._stack: list[_Frame] = []
        self._sites: weakref.WeakKeyDictionary[nn.Module, HookedModule] = weakref.WeakKeyDictionary()
        self._reach: dict[str, frozenset[int]] = {}
        self._later: list[tuple[nn.Module, Unit]] = []  # uses to add once nothing runs

    def extend(self, module: nn.Module, unit: Unit) -> None:
        """Let a module's forwards use one more unit."""
        site = self._sites.get(module)
        if site is None:
            self.install(module, HookedModule(f"<{type(module).__name__} with a parameter of {unit.name}>", (unit,)))
        elif any(frame.site is site for frame in self._stack):
            self._later.append((module, unit))  # a running forward leaves what it has entered
        elif unit not in site.units:
            site.units = tuple(sorted((*site.units, unit), key=lambda each: each.index))
            self._reach.clear()

    def install(self, module: nn.Module, site: HookedModule) -> None:
        """Hook one module."""
        self._sites[module] = site
        self._reach.clear()
        self._handles.append(
            module.register_forward_pre_hook(self._before(site), prepend=True, with_kwargs=True)
        )
        self._handles.append(
            module.register_forward_hook(self._after(site), with_kwargs=True, always_call=True)
        )

    def _extend_later(self) -> None:
        later, self._later[:] = list(self._later), []
        for module, unit in later:
            self.extend(module, unit)

    def reach(self, key: PhaseKey) -> frozenset[int]:
        """Units that are gathered in some forward of the module where a kind of forward begins, or inside it."""
        start = str(key[1])
        if start not in self._reach:
            found: set[int] = set()
            for site in self._sites.values():
                if start == "" or f"{site.path}.".startswith(f"{start}."):
                    found.update(unit.index for unit in site.units if not unit.persistent)
            self._reach[start] = frozenset(found)
        return self._reach[start]

    @property
    def root(self) -> nn.Module | None:
        """The module whose hooks these are, unless it is gone."""
        return next((module for module, site in self._sites.items() if site.path == ""), None)

    def watch_gradients(self, unit: Unit, first: int = 0) -> None:
        """Tell of the gradients of a unit's trainable parameters, from position ``first`` on."""
        parameters = [parameter for buffer in unit.trainable_buffers for parameter in buffer.parameters]
        for position, parameter in enumerate(parameters[first:], first):
            ready = self._gradient_hook(unit.index, position)
            self._handles.append(parameter.register_post_accumulate_grad_hook(ready))

    def _gradient_hook(self, index: int, position: int) -> Callable[[Tensor], None]:
        ref = self._driver  # knowing the unit, a hook would keep it, unseen by the collector

        def ready(parameter: Tensor) -> None:
            driver = ref()
            if driver is not None:
                driver.gradient_ready(index, position)

        return ready

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
        """Sites on the call stack."""
        return len(self._stack)

    def _before(self, site: HookedModule) -> Callable[..., object]:
        ref, stack = self._driver, self._stack

        def before(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            driver = ref()
            if driver is None:
                return None
            changed = driver.enter(site, module.training, args, kwargs)
            call = BackwardCall(ref, site) if torch.is_grad_enabled() else None
            stack.append(_Frame(site, call, sys.exc_info()[1]))
            if call is not None and site.frozen:
                inputs = differentiable((args, kwargs))
                handles = call.watch(inputs)
                self._on_leaves += [h for h, tensor in zip(handles, inputs, strict=True) if tensor.is_leaf]
            return changed

        opaque: Callable[..., object] = torch.compiler.disable(before)

        def before_or_skip(*arguments: object) -> object:
            site.skipped = torch.compiler.is_compiling() and not site.units and bool(stack)
            return None if site.skipped else opaque(*arguments)

        return opaque if site.units else before_or_skip

    def _after(self, site: HookedModule) -> Callable[..., object]:
        ref, stack, later = self._driver, self._stack, self._later

        def after(module: nn.Module, args: object, kwargs: object, output: object) -> object:
            driver = ref()
            if driver is None or not any(frame.site is site for frame in stack):
                return None
            frame = stack.pop()
            while frame.site is not site:  # frames of modules that an error skipped
                frame = stack.pop()
            failed = sys.exc_info()[1] is not frame.error
            returns = Return.NEVER
            if not failed:
                output = copy_views(output, driver.passing if stack else driver.storages, site.path)
            if frame.call is None and not failed and stack and stack[0].call is not None:
                returns = Return.ANNOUNCED
            elif frame.call is not None and not failed:
                outputs = differentiable(output)
                stored = _stored_tensors(module, site, deep=not outputs)
                outputs += [tensor for tensor in stored if all(tensor is not other for other in outputs)]
                for tensor in outputs:
                    handle = tensor.register_hook(frame.call)
                    if tensor.is_leaf:  # it outlives the graph, and would collect hooks of old ones
                        self._on_leaves.append(handle)
                if outputs:
                    returns = Return.ANNOUNCED
                elif site.trainable or differentiable((args, kwargs)):
                    returns = Return.UNANNOUNCED
            driver.leave(site, returns=returns, failed=failed)
            if later and not stack:
                self._extend_later()
            return output

        opaque: Callable[..., object] = torch.compiler.disable(after)

        def after_or_skip(*arguments: object) -> object:
            if torch.compiler.is_compiling() and site.skipped:
                site.skipped = False
                return None
            return opaque(*arguments)

        return opaque if site.units else after_or_skip
