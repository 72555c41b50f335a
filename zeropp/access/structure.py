"""The check that a wrapped model still has the modules and parameters that it was wrapped with."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeropp.access.cuda_graphs import refuse_cuda_graphs
from zeropp.access.refusals import restorer
from zeropp.engine.engine import Engine
from zeropp.params.guard import handler_of, is_managed

__all__ = ["check_structure", "watch_structure"]

_CHECK = "_zeropp_structure"  # in the __dict__ of a wrapped model

# Unbound, so that map runs it without a frame of Python for each table.
_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values


class _Structure:
    """The tree of modules as it was; it holds modules below the root, so only the root may hold it."""

    def __init__(self, model: nn.Module) -> None:
        # Known ones that nobody partitions. Held, or ids might be used again.
        self._apart: dict[int, nn.Parameter] = {}
        self.note(model)

    def note(self, model: nn.Module) -> None:
        """This is how it is to be from now on."""
        # The dicts themselves: modules replace what is in them, not the dicts.
        tables = [table for module in model.modules() for table in (module._modules, module._parameters)]
        self._tables: list[dict[str, Any]] = tables
        # Held for the same reason.
        self._entries = list(chain.from_iterable(map(_values, self._tables)))
        self._ids = list(map(id, self._entries))
        self._own = {id(module): set(map(id, module._parameters.values())) for module in model.modules()}
        self._apart |= {id(parameter): parameter for parameter in model.parameters() if not is_managed(parameter)}

    def has_changed(self) -> bool:
        """Looks at identities alone, in loops of the interpreter's own: this runs before every forward."""
        return list(map(id, chain.from_iterable(map(_values, self._tables)))) != self._ids

    def tied_in(self, model: nn.Module, engine: Engine) -> list[str]:
        """Names of parameters of the engine that stand in a module where they were not before."""
        found = []
        for path, module in model.named_modules():
            own = self._own.get(id(module), set())
            here = [(name, p) for name, p in module._parameters.items() if p is not None and id(p) not in own]
            moved = [name for name, parameter in here if handler_of(parameter) is engine]
            found += [f"{path}.{name}" if path else name for name in moved]
        return found

    def new_in(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Parameters that nobody partitioned, by name."""
        return {n: p for n, p in model.named_parameters() if id(p) not in self._apart and not is_managed(p)}


def _moves(engine: Engine, parameter: nn.Parameter) -> bool:
    return any(parameter is p for u in engine.units if not u.persistent for b in u.buffers for p in b.parameters)


def watch_structure(model: nn.Module, engine: Engine) -> None:
    """Let every forward of the model from outside refuse parameters that came after it was wrapped.

    Modules without parameters may come and go, as some make theirs when they first run; and what is taken out stays
    managed and unused.
    """
    structure, ref = _Structure(model), weakref.ref(engine)

    def check(module: nn.Module, args: object) -> None:
        engine = ref()
        # A pass that has begun is not refused half-way.
        if engine is None or engine.running or not structure.has_changed():
            return
        new = structure.new_in(module)
        if new:
            raise _of_new_parameters(new)
        tied = structure.tied_in(module, engine)
        if tied:
            raise RuntimeError(
                f"parameters {tied} were tied to others after the model was wrapped: backward would not know where "
                "they are used. Tie them before wrapping; or let go of the optimizer (del optimizer) and wrap again"
            )
        refuse_cuda_graphs(module, engine.device, partial(_moves, engine))
        # What brings no parameters is accepted, once: the next forward compares with this.
        structure.note(module)

    # On the root alone, as the hook: see the class above.
    model.__dict__[_CHECK] = check
    engine.on_close(restorer(model, _CHECK))
    # Prepended after all others, so that it runs first: a pass that is refused has not begun.
    engine.hooks.keep(model.register_forward_pre_hook(torch.compiler.disable(check), prepend=True))


def _of_new_parameters(new: dict[str, torch.Tensor]) -> RuntimeError:
    names = f"{[*new][:10]}{'...' if len(new) > 10 else ''}"
    # A module takes parameters alone by itself.
    if any(not isinstance(tensor, nn.Parameter) for tensor in new.values()):
        return RuntimeError(
            f"the model was called with other tensors in the place of its parameters {names}, as by "
            "torch.func.functional_call, alone or inside vmap, grad and other transforms of torch.func. The weights of "
            "this model are gathered and their gradients reduced in hooks, in which such tensors have no part. For "
            "gradients of each sample call backward for one sample after the other; or transform a model that is not "
            "wrapped, which has loaded zeropp.full_state(model)"
        )
    return RuntimeError(
        f"parameters {names} came after the model was wrapped, by themselves or with a module put in another's place: "
        "nothing would partition, reduce or step them. Wrap the finished model; to change a wrapped one let go of its "
        "optimizer (del optimizer), change it and wrap it again, which takes the trained weights over"
    )


def check_structure(model: nn.Module) -> None:
    """Refuse of a wrapped model what its forward would refuse; for passes that do not call that forward."""
    model.__dict__[_CHECK](model, ())
