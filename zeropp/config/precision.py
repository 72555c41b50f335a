"""Blocks that choose number formats: fp16, bf16, autocast and the types of what is accumulated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from zeropp.config.base import Block, Count, NonNegative
from zeropp.config.describe import value_text

_SPELLINGS = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32",
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "bf16": "bf16", "bfloat16": "bf16",
}  # fmt: skip


def _canonical(value: object) -> object:
    """Accepts `float32`, `torch.float32` (string or dtype object) and the like beside `fp32`."""
    # str() of a dtype object is "torch.float32". What is not known goes on, for pydantic to refuse as it was given.
    return _SPELLINGS.get(str(value).lower().removeprefix("torch."), value)


def _scale(value: object) -> object:
    """Refuse "dynamic", which other libraries write for a dynamic loss scale; here it is 0."""
    if isinstance(value, str) and value.lower() == "dynamic":
        raise ValueError(f"got {value_text(value)}; expected a number >= 0; set 0, which means a dynamic scale")
    return value


Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_canonical)]


class Fp16Config(Block):
    """Computes in fp16 with a loss scale that keeps small gradients from vanishing."""

    enabled: bool = False
    """Holds weights and activations in fp16; main weights and optimizer states stay in fp32. Losses go through
    `optimizer.backward(loss)` or `optimizer.scale(loss)`."""

    auto_cast: bool = False
    """Asks that the floating inputs of the model are cast to fp16. Nothing is left to do: they are, unless
    `zeropp.cast_inputs` is false."""

    loss_scale: Annotated[NonNegative, BeforeValidator(_scale)] = 0.0
    """Factor on the loss before backward, taken out of the gradients again before the step. 0 chooses it
    dynamically, any other value is kept throughout."""

    initial_scale_power: Count = 16
    """The first dynamic scale, as an exponent of 2: 16 starts at a factor of 65,536."""

    loss_scale_window: Count = 1000
    """Consecutive steps with finite gradients after which the dynamic scale is doubled."""

    hysteresis: Count = 2
    """Steps with overflowed gradients until the dynamic scale is halved, that one included. It is full again
    when the scale is doubled."""

    consecutive_hysteresis: bool = False
    """Refills the hysteresis at each step without overflow, so that only overflows in a row add up."""

    min_loss_scale: NonNegative = 1.0
    """The factor below which the dynamic scale is never lowered; an overflow there is an error."""

    fp16_master_weights_and_grads: bool = False
    """Keeps main weights, gradients and optimizer states in fp16 instead of fp32: half the memory, lower
    precision. For optimizers that divide by no second moments, such as SGD and Lion: those of AdamW vanish."""

    @model_validator(mode="after")
    def _dynamic_scale_can_move(self) -> Fp16Config:
        # 0 means dynamic. Halving has to end above 0, and 0 steps say nothing of when to double.
        if self.loss_scale == 0 and (self.loss_scale_window == 0 or self.min_loss_scale == 0):
            raise ValueError(
                "a dynamic loss scale (loss_scale 0) needs loss_scale_window and min_loss_scale above 0, got "
                f"{self.loss_scale_window} and {self.min_loss_scale:g}; raise them or fix loss_scale"
            )
        return self


class Bf16Config(Block):
    """Computes in bf16. Its exponent range is that of fp32, so there is no loss scale."""

    enabled: bool = False
    """Holds weights and activations in bf16; the optimizer steps fp32 weights."""

    immediate_grad_update: bool = False
    """Adds a gradient to the fp32 sum as soon as backward has made it. There is nothing to choose here: a
    unit's gradients always go to its fp32 shard when they are complete."""

    check_grad_overflow: bool = True
    """Skips and counts a step whose gradients are not finite, on every rank alike. With `false` such a step
    is taken, as plain torch takes it: a single NaN reaches the weights. The check costs no message."""

    bf16_master_weights_and_grads: bool = False
    """Keeps main weights and gradients of the optimizer in bf16 instead of fp32: half the memory, updates
    that are small beside their weight are lost. Only together with `bf16_optimizer_states`."""

    bf16_optimizer_states: bool = False
    """Keeps optimizer states in bf16 instead of fp32. Only together with `bf16_master_weights_and_grads`:
    optimizers of torch make states in the type of the weights that they step."""


class AutocastConfig(Block):
    """Runs the forward pass under torch autocast, with main weights and most others in fp32."""

    enabled: bool = False
    """Wraps the model's forward in `torch.autocast`. Losses of fp16 are scaled as the `fp16` block says."""

    dtype: Annotated[Literal["fp16", "bf16"], BeforeValidator(_canonical)] = "bf16"
    """Type that autocast lowers to."""

    lower_precision_safe_modules: tuple[str, ...] | None = None
    """Classes of the modules whose weights are gathered, and whose gradients travel, in the autocast type, by
    names such as `torch.nn.Linear`; `null` is that and `Conv1d`, `Conv2d`, `Conv3d`. Not their subclasses."""


class DataTypesConfig(Block):
    """Number formats of what is kept rather than computed with."""

    grad_accum_dtype: Dtype | None = None
    """Type of the gradients summed over micro-batches: fp32, or that of main weights that are kept in 16 bits.
    `null` is that type, and another one is refused."""

    param_dtype: Dtype | None = None
    """Type of the weights in the computation, which must not be another than that of a `bf16` or `fp16` block that
    is enabled; `null` is that, or without one each parameter's own."""

    buffer_dtype: Dtype | None = None
    """Type that floating module buffers are converted to; `null` leaves each as it is."""

    keep_in_fp32_modules: tuple[str, ...] | None = None
    """Modules, by parts of their names, whose parameters are computed with in fp32 though `bf16` or `fp16` is
    enabled. The model converts what it hands them."""
