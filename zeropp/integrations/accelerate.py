"""Own loops around Hugging Face's ``Accelerator``, with a model that zeropp partitions.

    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    loader = accelerator.prepare(loader)
    model, optimizer, scheduler = zeropp.integrations.accelerate.prepare(
        accelerator, model, optimizer, scheduler, config="zero3.json")

and the loop stays as Accelerate's documentation has it. What goes through its DeepSpeed plugin, as transformers'
``Trainer`` does, runs under the stand-in instead (`zeropp.compat.deepspeed`).
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, convert_to_fp32
from torch import Tensor, nn
from torch.optim import Optimizer

from zeropp import checkpoint
from zeropp.config import Config, ConfigError, ConfigSource, load_config
from zeropp.deepspeed.readable_weights import ReadableWeights
from zeropp.optimizer.checks import weakly
from zeropp.optimizer.wrapper import ZeroOptimizer

__all__ = ["prepare"]

# Those whose own way to prepare a model is to partition it.
_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class _Prepared(AcceleratedOptimizer):
    """Steps at the end of Accelerate's windows, and knows of steps that were skipped."""

    @property
    def step_was_skipped(self) -> bool:
        """True if a gradient of the last step was not finite on some rank."""
        return bool(self.optimizer.step_was_skipped)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    *schedulers: Any,
    config: ConfigSource = None,
) -> tuple[Any, ...]:
    """Partition a model, and fit it into an ``Accelerator``. Collective. Call it once for each model.

    After it, ``accumulate``, ``backward``, ``no_sync``, ``clip_grad_norm_`` of the model's parameters (the norm is that
    of the whole model, over all ranks), ``save_state`` and ``load_state`` (each rank its own part, on any number of
    ranks), ``get_state_dict`` and ``unwrap_model`` of the accelerator do what they do for other models.

    Args:
        accelerator: of "no" or "bf16" precision; the latter is torch's autocast, as Accelerate's own.
        model: partitioned in place; do not prepare it again.
        optimizer: elementwise, over parameters of the model.
        schedulers: of the optimizer, prepared as Accelerate does: each step is one for each process, unless batches are
            split.
        config: zeropp's; None for stage 3. ``gradient_accumulation_steps`` and clipping are the accelerator's.

    Returns:
        The model, the optimizer, and the schedulers.

    Raises:
        ConfigError: the configuration and the accelerator say different things.
        RuntimeError: the accelerator is for DeepSpeed, FSDP, Megatron-LM or XLA, which partition by themselves.
        TypeError, ValueError: model or optimizer cannot be used.
    """
    if accelerator.distributed_type in _OTHERS:
        raise RuntimeError(
            f"the accelerator is for {accelerator.distributed_type.value}, which prepares models in its own way; make "
            "an Accelerator() without a plugin, or, for DeepSpeed's, run under python -m zeropp.compat.deepspeed"
        )
    for each in schedulers:
        if not hasattr(each, "step"):
            raise TypeError(
                f"a scheduler has a step(), and a {type(each).__name__} was given; name the configuration: config=..."
            )
    wrapped = ZeroOptimizer(optimizer, model, _fitting(accelerator, config), device=accelerator.device)
    # Scripts of Accelerate's DeepSpeed plugin read weights, and merge adapters, between steps of stages 0 to 2.
    wrapped.engine.let_weights_be_read(ReadableWeights())
    # So Accelerate, and whoever prepares everything once more, leaves both as they are.
    model._is_accelerate_prepared = True  # type: ignore[assignment]  # torch's modules take anything
    # It looks for this in accumulate(), and takes models without it for ones that need none.
    model.no_sync = weakly(wrapped.no_sync)  # type: ignore[assignment]
    if accelerator.mixed_precision == "bf16":
        model.register_forward_hook(_in_float32)
    prepared = _Prepared(wrapped, device_placement=False, scaler=None)
    prepared._is_accelerate_prepared = True
    _clip_whole(accelerator, model, wrapped)
    _save_parts(accelerator, model, wrapped)
    return model, prepared, *(_scheduled(accelerator, each, prepared) for each in schedulers)


def _fitting(accelerator: Accelerator, config: ConfigSource) -> Config:
    """The configuration, with what the accelerator says of precision."""
    loaded = load_config(config)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigError(
            f"the accelerator's mixed_precision is {accelerator.mixed_precision!r}; expected 'no' or 'bf16'. For "
            "float16, Accelerate's DeepSpeed plugin runs under python -m zeropp.compat.deepspeed"
        )
    if (loaded.gradient_accumulation_steps or 1) != 1 or loaded.gradient_clipping:
        # Both would divide, or clip.
        raise ConfigError(
            "gradient_accumulation_steps and gradient_clipping are set in the configuration; with an Accelerator leave "
            "them out: give Accelerator(gradient_accumulation_steps=...), and call accelerator.clip_grad_norm_"
        )
    if accelerator.mixed_precision == "no" or loaded.bf16.enabled or loaded.torch_autocast.enabled:
        return loaded
    given = loaded.model_dump(exclude_unset=True, by_alias=True)
    return load_config({**given, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}})


def _in_float32(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # As of a model that Accelerate has prepared itself: losses that are computed outside are of float32.
    return convert_to_fp32(output)


def _clip_whole(accelerator: Accelerator, model: nn.Module, wrapped: ZeroOptimizer) -> None:
    """Let the accelerator clip by what all ranks have, where it is asked for this model's parameters."""
    by_norm, by_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_
    own = {id(parameter) for parameter in model.parameters()}
    # Weakly: an accelerator may outlive the models that it has had.
    models = weakref.ref(model)
    optimizers = weakref.ref(wrapped)

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = {id(parameter) for parameter in given}
        kept = models()
        clipping = optimizers()
        if kept is None or clipping is None or not found & own:
            # Another model's, which may be prepared here, too.
            return by_norm(given, max_norm, norm_type)
        trained = {id(parameter) for parameter in kept.parameters() if parameter.requires_grad}
        if norm_type != 2 or not trained <= found:
            raise ValueError(
                f"clip_grad_norm_ got {len(trained & found)} of the {len(trained)} parameters that the model trains, "
                f"and norm_type {norm_type}; zeropp clips by the 2-norm of all of them: give model.parameters()"
            )
        return clipping.clip_grad_norm_(max_norm)

    def clip_grad_value_(parameters: Any, clip_value: float) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if {id(parameter) for parameter in given} & own:
            raise ValueError("clip_grad_value_ is not in zeropp, whose gradients lie in pieces; use clip_grad_norm_")
        by_value(given, clip_value)

    accelerator.clip_grad_norm_ = clip_grad_norm_
    accelerator.clip_grad_value_ = clip_grad_value_


def _save_parts(accelerator: Accelerator, model: nn.Module, wrapped: ZeroOptimizer) -> None:
    """Let ``save_state`` and ``load_state`` have this model's part of each rank, beside what Accelerate saves."""
    # Accelerate itself would ask every rank for whole weights, and save the first rank's states alone.
    # Counted by what was prepared here: other hooks may be there when a run resumes, and not when it saved.
    number = accelerator.__dict__.setdefault("_zeropp_models", 0)
    accelerator._zeropp_models += 1
    name = "zeropp" if number == 0 else f"zeropp_{number}"
    models = weakref.ref(model)
    optimizers = weakref.ref(wrapped)

    def save(_models: list[nn.Module], _weights: list[Any], folder: str) -> None:
        if (kept := models()) is not None:
            checkpoint.save(Path(folder) / name, kept, optimizers(), progress=False)

    def load(_models: list[nn.Module], folder: str) -> None:
        if (kept := models()) is not None:
            checkpoint.load(Path(folder) / name, kept, optimizers(), progress=False)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _scheduled(accelerator: Accelerator, scheduler: Any, prepared: _Prepared) -> Any:
    found = accelerator.prepare_scheduler(scheduler)
    # It knows optimizers that it has prepared itself, and would go on where this one has skipped a step.
    found.optimizers = [prepared]
    return found
