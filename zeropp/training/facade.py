"""``optimizer.parameter_offload``: what scripts that take DeepSpeed's hooks off a model, and put them back, reach into.

They do so to generate inside ``GatheredParameters``, where zeropp's hooks do nothing anyway. So there is nothing to
take off, and all calls are harmless.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["ParameterOffload"]


class _Coordinator:
    """``param_coordinator``: an order of gathers that is known, and nothing to forget."""

    def is_invalid_trace(self) -> bool:
        """False: what is known of the order holds."""
        return False

    def _invalidate_trace(self) -> None:
        """Nothing: whoever parts from a known order is noticed."""


class ParameterOffload:
    """Has the names of DeepSpeed's, and no hooks.

    Attributes:
        module: the model.
        forward_hooks, backward_hooks: empty lists, which may be assigned.
        param_coordinator: says that its order is known.
    """

    def __init__(self, module: nn.Module) -> None:
        # Assigned by those scripts, too, and so no properties.
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _Coordinator()

    def _register_deepspeed_module(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Nothing: hooks have never been away."""

    def _register_hooks_recursively(self, module: nn.Module, count: list[int] | None = None) -> None:
        """Nothing, as :meth:`_register_deepspeed_module`, by its older name."""

    def get_param_coordinator(self, training: bool = True) -> _Coordinator:
        """:attr:`param_coordinator`."""
        return self.param_coordinator
