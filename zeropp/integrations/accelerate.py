"""``prepare``: use Hugging Face's ``Accelerator`` in your own training loop with a model that zeropp shards.

    accelerator = Accelerator(gradient_accumulation_steps=4, mixed_precision="bf16")
    loader = accelerator.prepare(loader)
    model, optimizer, scheduler = zeropp.integrations.accelerate.prepare(
        accelerator, model, optimizer, scheduler, config="zero3.json")

The rest of the loop stays as Accelerate's documentation describes. Scripts that use Accelerate's DeepSpeed plugin, such
as those with transformers' ``Trainer``, need the stand-in for ``deepspeed`` instead (`zeropp.compat.deepspeed`).
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

# Kinds of accelerators that already shard a model in their own prepare().
_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class _Prepared(AcceleratedOptimizer):
    """Accelerate's optimizer wrapper, which steps at the boundary, with zeropp's report of skipped steps."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because some rank had a gradient that was not finite."""
        return bool(self.optimizer.step_was_skipped)


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    *schedulers: Any,
    config: ConfigSource = None,
) -> tuple[Any, ...]:
    """Shard a model and connect it with an ``Accelerator``. Collective. Call it once for each model.

    Afterwards these methods of the accelerator work with the model: ``accumulate``, ``backward``, ``no_sync``,
    ``clip_grad_norm_`` (by the norm over the whole model and all ranks), ``save_state`` and ``load_state`` (each rank
    saves its own shards, and any number of ranks can load them), ``get_state_dict`` and ``unwrap_model``.

    Args:
        accelerator: accelerator with precision "no" or "bf16". For "bf16" the model runs under torch's autocast, as
            with Accelerate itself.
        model: model, sharded in place. Do not pass it to ``accelerator.prepare``.
        optimizer: elementwise optimizer over the model's parameters.
        schedulers: schedulers of the optimizer. As with Accelerate, each call of ``step`` counts one step per process,
            unless the accelerator splits batches.
        config: zeropp's configuration; None for stage 3. It must not set ``gradient_accumulation_steps`` or
            ``gradient_clipping``, which belong to the accelerator.

    Returns:
        The model, the wrapped optimizer, and the schedulers.

    Raises:
        ConfigError: the configuration contradicts the accelerator, or the accelerator's precision is not supported.
        RuntimeError: the accelerator is for DeepSpeed, FSDP, Megatron-LM or XLA, which shard models themselves.
        TypeError, ValueError: the model, the optimizer or a scheduler cannot be used.
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
    # Scripts written for Accelerate's DeepSpeed plugin read weights and merge adapters between steps in stages 0 to 2.
    wrapped.engine.let_weights_be_read(ReadableWeights())
    # This mark makes accelerator.prepare() return the model and the optimizer unchanged.
    model._is_accelerate_prepared = True  # type: ignore[assignment]  # torch's modules take anything
    # accelerator.accumulate() calls model.no_sync(), and skips models without that attribute.
    model.no_sync = weakly(wrapped.no_sync)  # type: ignore[assignment]
    if accelerator.mixed_precision == "bf16":
        model.register_forward_hook(_in_float32)
    prepared = _Prepared(wrapped, device_placement=False, scaler=None)
    prepared._is_accelerate_prepared = True
    _clip_whole(accelerator, model, wrapped)
    _save_parts(accelerator, model, wrapped)
    return model, prepared, *(_scheduled(accelerator, each, prepared) for each in schedulers)


def _fitting(accelerator: Accelerator, config: ConfigSource) -> Config:
    """Return the configuration, with autocast added if the accelerator's precision is "bf16"."""
    loaded = load_config(config)
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigError(
            f"the accelerator's mixed_precision is {accelerator.mixed_precision!r}; expected 'no' or 'bf16'. For "
            "float16, Accelerate's DeepSpeed plugin runs under python -m zeropp.compat.deepspeed"
        )
    if (loaded.gradient_accumulation_steps or 1) != 1 or loaded.gradient_clipping:
        # Both libraries would divide losses, or clip gradients.
        raise ConfigError(
            "gradient_accumulation_steps and gradient_clipping are set in the configuration; with an Accelerator leave "
            "them out: give Accelerator(gradient_accumulation_steps=...), and call accelerator.clip_grad_norm_"
        )
    if accelerator.mixed_precision == "no" or loaded.bf16.enabled or loaded.torch_autocast.enabled:
        return loaded
    given = loaded.model_dump(exclude_unset=True, by_alias=True)
    return load_config({**given, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}})


def _in_float32(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # Accelerate also converts the outputs of models that it prepares, so that losses are computed in float32.
    return convert_to_fp32(output)


def _clip_whole(accelerator: Accelerator, model: nn.Module, wrapped: ZeroOptimizer) -> None:
    """Replace the accelerator's clipping methods, so that for this model they use the norm over all ranks."""
    by_norm, by_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_
    own = {id(parameter) for parameter in model.parameters()}
    # Weak references, because an accelerator may outlive its models.
    models = weakref.ref(model)
    optimizers = weakref.ref(wrapped)

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = {id(parameter) for parameter in given}
        kept = models()
        clipping = optimizers()
        if kept is None or clipping is None or not found & own:
            # The parameters are those of another model, or this model is gone. Call the replaced method, which serves
            # models that were prepared earlier.
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
    """Add hooks to ``save_state`` and ``load_state`` that save and load each rank's shards of this model."""
    # Without the hooks, Accelerate would ask every rank for full weights, and save the optimizer states of rank 0 only.
    # Number the folders by models prepared here, not by hooks: the run that resumes may have other hooks than the run
    # that saved.
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
    # Accelerate lists only optimizers that it has prepared itself. Without this one in the list, the scheduler would
    # step even if the optimizer's step was skipped.
    found.optimizers = [prepared]
    return found
