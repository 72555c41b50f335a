"""Precision plugins: a Trainer's or Fabric's precision, where zeropp keeps main weights and the loss scale."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeropp.deepspeed.training_engine import Engine
from zeropp.integrations._lightning.owners import core_of
from zeropp.integrations._lightning.packages import Packages

# Lightning's classes are nobody's types: those of two packages take their place.
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
"""A precision's name, and the dtype that the model computes in."""


class _Parts(_Base):
    """What both plugins do: dtypes of models and batches.

    Mixed and true precision both have float32 main weights; with true precision these begin with values that 16 bits
    hold, as with DeepSpeed.

    Attributes:
        packages: of Lightning.
        precision: one of ``PRECISIONS``.
    """

    packages: Packages
    precision: str

    def __init__(self, precision: str = "32-true") -> None:
        """Check the name.

        Raises:
            ValueError: it is no precision that zeropp has.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; with zeropp it is one of {', '.join(PRECISIONS)}")
        self.precision = precision
        self._dtype = PRECISIONS[precision]

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the model, with true precision."""
        floating = [each for each in module.parameters() if each.is_floating_point()]
        # What was built in the dtype, in pieces perhaps, is not to be touched for nothing; what is partitioned cannot.
        cast = not self.precision.endswith("-true") or all(each.dtype == self._dtype for each in floating)
        return module if cast or core_of(module) is not None else module.to(self._dtype)

    def convert_input(self, data: Any) -> Any:
        """A batch whose floating tensors have the dtype that the model computes in."""
        return self._convert(data, self._dtype)

    def _convert(self, data: Any, dtype: torch.dtype) -> Any:
        # Through whatever a batch is made of: dicts, lists, named tuples.
        apply = self.packages.find("fabric", "utilities.apply_func.apply_to_collection")
        return apply(data, Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each)

    @contextlib.contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Tensors that are made inside have the model's dtype, with true precision."""
        # Not by Lightning's own context, whose name is private.
        before = torch.get_default_dtype()
        if self.precision.endswith("-true"):
            torch.set_default_dtype(self._dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def module_init_context(self) -> Any:
        """As :meth:`tensor_init_context`."""
        return self.tensor_init_context()


class TrainerPrecisionParts(_Parts):
    """The plugin of a Trainer: backward with the loss scale, the step, and clipping, by the engine."""

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Backward of a loss that Lightning has divided, times the scale of float16."""
        # By the module's own hook, which may be the user's.
        model.backward(_engine(model).scale(tensor, scale_wrt_gas=False), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the micro-batch that ends a window, clip, and step."""
        # Not handed to the step, which asks ranks for their agreement first.
        result = closure()
        self._after_closure(model, optimizer)
        _engine(model).step(**kwargs)
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip by the norm of all gradients: here if a hook of the user's asks for it, else in the engine's step.

        Raises:
            MisconfigurationException: by value.
        """
        if clip_val <= 0:
            return
        # Lightning's enumeration of algorithms is one of strings.
        if gradient_clip_algorithm != "norm":
            raise self.packages.misuse(
                f"gradient_clip_algorithm is {str(gradient_clip_algorithm)!r}; zeropp clips by norm, 'norm'"
            )
        # A user's hook hands over Lightning's wrapper around the optimizer.
        wrapped = getattr(optimizer, "_optimizer", optimizer)
        # The step does it by itself then, in the same pass over the gradients.
        if wrapped.config.gradient_clipping != clip_val:
            wrapped.clip_grad_norm_(clip_val, now=True)


class FabricPrecisionParts(_Parts):
    """The plugin of Fabric."""

    def convert_output(self, data: Any) -> Any:
        """What the model gave, floating tensors in torch's default dtype."""
        # Losses and metrics of Fabric's loops are computed outside of the model.
        return self._convert(data, torch.get_default_dtype())

    def backward(self, tensor: Tensor, model: Engine, *args: Any, **kwargs: Any) -> None:
        """The engine's, which applies the loss scale."""
        model.scale(tensor).backward(*args, **kwargs)

    def optimizer_step(self, optimizer: Engine, **kwargs: Any) -> Any:
        """The engine's step.

        Raises:
            TypeError: with a closure.
        """
        if kwargs.pop("closure", None) is not None:
            raise TypeError("optimizer.step() takes no closure in zeropp; call fabric.backward(loss), then step()")
        return optimizer.step(**kwargs)


def _engine(module: Any) -> Engine:
    """What trains a LightningModule."""
    engine: Engine = module.trainer.strategy.engine
    return engine
