"""Precision plugins for a Trainer and for Fabric. zeropp keeps the main weights and the loss scale."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeropp.deepspeed.training_engine import Engine
from zeropp.integrations._lightning.owners import core_of
from zeropp.integrations._lightning.packages import Packages

# The base class is only known at run time: two packages, lightning and pytorch_lightning, have classes of these names.
if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object

__all__ = ["PRECISIONS", "FabricPrecisionParts", "TrainerPrecisionParts"]

PRECISIONS = {
    "32-true": torch.float32,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
}
"""Name of a precision -> dtype that the model computes in."""


class _Parts(_Base):
    """Conversion of models and batches to a dtype, for both plugins.

    The main weights are float32 with mixed and with true precision. With true precision their initial values are
    rounded to 16 bits, as in DeepSpeed.

    Attributes:
        packages: the modules of Lightning's package.
        precision: one of ``PRECISIONS``.
    """

    packages: Packages
    precision: str

    def __init__(self, precision: str = "32-true") -> None:
        """Check and store the name of the precision.

        Raises:
            ValueError: the name is not in ``PRECISIONS``.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; with zeropp it is one of {', '.join(PRECISIONS)}")
        self.precision = precision
        self._dtype = PRECISIONS[precision]

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the model, cast to 16 bits if the precision is a true 16-bit precision."""
        floating = [each for each in module.parameters() if each.is_floating_point()]
        # Leave a model alone that already has the dtype, or that is sharded: sharded parameters refuse to be cast.
        cast = not self.precision.endswith("-true") or all(each.dtype == self._dtype for each in floating)
        return module if cast or core_of(module) is not None else module.to(self._dtype)

    def convert_input(self, data: Any) -> Any:
        """Return a batch with its floating-point tensors cast to the dtype that the model computes in."""
        return self._convert(data, self._dtype)

    def _convert(self, data: Any, dtype: torch.dtype) -> Any:
        # Lightning's function handles nested batches: dicts, lists and named tuples.
        apply = self.packages.find("fabric", "utilities.apply_func.apply_to_collection")
        return apply(data, Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each)

    @contextlib.contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Context in which new tensors have the model's dtype, with true precision; no effect with mixed precision."""
        # Written here because Lightning's own context manager for this is private.
        before = torch.get_default_dtype()
        if self.precision.endswith("-true"):
            torch.set_default_dtype(self._dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def module_init_context(self) -> Any:
        """Return the context of :meth:`tensor_init_context`, for new modules."""
        return self.tensor_init_context()


class TrainerPrecisionParts(_Parts):
    """Precision plugin of a Trainer: backward with the loss scale, the step and clipping call the engine."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward for a loss that Lightning has divided already, multiplied by the loss scale of float16."""
        # model.backward() is a hook of LightningModule that the user may override.
        model.backward(_engine(model).scale(tensor, scale_wrt_gas=False), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the last micro-batch of a window (the closure), let Lightning clip, and step the engine."""
        # Call the closure here, because it runs forward and backward, and Engine.step() takes no closure.
        result = closure()
        self._after_closure(model, optimizer)
        _engine(model).step(**kwargs)
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip by the gradient norm: at once for a user's hook, otherwise leave it to the engine's step.

        Raises:
            MisconfigurationException: the algorithm is not "norm".
        """
        if clip_val <= 0:
            return
        # The enumeration of algorithms in Lightning derives from str, so this comparison works for its members.
        if gradient_clip_algorithm != "norm":
            raise self.packages.misuse(
                f"gradient_clip_algorithm is {str(gradient_clip_algorithm)!r}; zeropp clips by norm, 'norm'"
            )
        # In the user's hook, the optimizer is wrapped by Lightning.
        wrapped = getattr(optimizer, "_optimizer", optimizer)
        # With the configuration's own norm, the step clips in the same pass over the gradients.
        if wrapped.config.gradient_clipping != clip_val:
            wrapped.clip_grad_norm_(clip_val, now=True)


class FabricPrecisionParts(_Parts):
    """Precision plugin of Fabric: backward with the loss scale, and the step, call the engine."""

    def convert_output(self, data: Any) -> Any:
        """Return the model's output with floating-point tensors in torch's default dtype."""
        # Fabric's user computes losses and metrics outside of the model, in the default dtype.
        return self._convert(data, torch.get_default_dtype())

    def backward(self, tensor: Tensor, model: Engine, *args: Any, **kwargs: Any) -> None:
        """Run backward for a loss multiplied by the loss scale."""
        model.scale(tensor).backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Engine, **kwargs: Any) -> Any:
        """Step the engine.

        Raises:
            TypeError: a closure is given.
        """
        if kwargs.pop("closure", None) is not None:
            raise TypeError("optimizer.step() takes no closure in zeropp; call fabric.backward(loss), then step()")
        return optimizer.step(**kwargs)


def _engine(module: Any) -> Engine:
    """Return the engine that trains a LightningModule."""
    engine: Engine = module.trainer.strategy.engine
    return engine
