"""``initialize``: make an engine that trains a model from a configuration, with the arguments of DeepSpeed's call."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from zeropp.comm.process_groups import Group
from zeropp.config import Config, ConfigError, load_config
from zeropp.config.base import notify_once
from zeropp.deepspeed.distributed import init_distributed, require_no_model_parallelism
from zeropp.deepspeed.json_optimizers import make_optimizer, make_scheduler
from zeropp.deepspeed.leaf_modules import mark_configured
from zeropp.deepspeed.training_engine import Engine
from zeropp.deepspeed.training_optimizer import TrainingOptimizer
from zeropp.deepspeed.zero_inference import wrap_for_inference
from zeropp.engine.engine import Engine as Core
from zeropp.optimizer.wrapper import ZeroOptimizer
from zeropp.setup.build import built_for

__all__ = ["initialize"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Params], Optimizer] | None = None,
    model_parameters: Params | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, ZeroOptimizer | None, DataLoader[Any] | None, Any]:
    """Partition a model and return an engine for it, with optimizer, data loader and scheduler. Collective.

    Arguments and results are those of ``deepspeed.initialize``.

    Args:
        args: namespace or dict; read are ``deepspeed_config`` (instead of ``config``), ``local_rank``, and
            ``device_rank``: the index of this rank's GPU, or negative to leave the model on its device.
        model: model to partition in place, with rank 0's values. The model moves to this rank's GPU, if there is one.
        optimizer: elementwise optimizer over parameters of the model, or a function from parameters to an optimizer.
            None for the configuration's optimizer; the engine is for inference if the configuration has none.
        model_parameters: tensors or parameter groups to train, if ``optimizer`` is not an optimizer yet; None for all
            parameters that require gradients.
        training_data: data set for the returned data loader.
        lr_scheduler: scheduler to step, or a function from the optimizer to one; None for the configuration's.
        distributed_port: port of the first rank, if no launcher sets one.
        mpu: object whose ``get_data_parallel_group()`` returns the process group to partition over.
        dist_init_required: False to raise if no default process group exists.
        collate_fn: function from a list of samples to a batch.
        config: a dict, the path of a JSON file, or base64 of JSON.
        mesh_param: refused; give a group by ``mpu``.
        config_params: older name of ``config``.

    Returns:
        The engine, its ``ZeroOptimizer`` (None for inference), the data loader or None, and the scheduler or None.

    Raises:
        ConfigError, TypeError, ValueError: an argument or the configuration cannot be used.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if mesh_param is not None:
        raise ValueError("mesh_param is not in zeropp, which partitions over one group of ranks; give it by mpu")
    loaded, given = _read_config(_chosen_config(args, config, config_params))
    # After the configuration was read, so that a wrong file raises without waiting for other ranks.
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    local_rank = _align_local_rank(args)
    inner = _make_optimizer(loaded, model, optimizer, model_parameters)
    if inner is not None:
        _warn_of_no_clipping(loaded, given)
    wrapped, core = _wrap(loaded, model, inner, _group(mpu), args)
    scheduler = _make_scheduler(loaded, wrapped, lr_scheduler)
    engine = Engine(model, wrapped, scheduler, loaded, given, core=core, local_rank=local_rank, collate_fn=collate_fn)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, wrapped, engine.training_dataloader, engine.lr_scheduler


def _wrap(
    loaded: Config, model: nn.Module, inner: Optimizer | None, group: Group, args: Any
) -> tuple[ZeroOptimizer | None, Core]:
    """Partition the model, and return its `ZeroOptimizer` (None for inference) and its core engine.

    Args:
        loaded: checked configuration.
        model: model to partition in place.
        inner: optimizer to wrap; None for inference.
        group: process group to partition over; None for all ranks.
        args: ``args`` of :func:`initialize`.
    """
    # Remove both blocks: this module makes the optimizer and the scheduler, and ZeroOptimizer refuses a configuration
    # that has these blocks.
    rest = loaded.model_copy(update={"optimizer": None, "scheduler": None})
    # A model built in zero.Init stores the device that it trains on, so that device is used.
    device = None if built_for(list(model.parameters())) is not None else _device(args)
    if inner is None:
        wrapped = None
        core = wrap_for_inference(model, rest, group, device)
    else:
        wrapped = TrainingOptimizer(inner, model, rest, process_group=group, device=device)
        core = wrapped.engine
    if loaded.zero.stage == 3:
        mark_configured(model, loaded.zero.leaf_module)
    return wrapped, core


def _chosen_config(args: Any, config: Any, config_params: Any) -> Any:
    """Return the configuration from the one argument that gives it; raise ConfigError if none or several do."""
    named = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": _argument(args, "deepspeed_config"),
        # DeepScale is DeepSpeed's former name. DeepSpeed reads this argument as well.
        "args.deepscale_config": _argument(args, "deepscale_config"),
    }
    # Two configurations may contradict each other, so more than one is refused.
    found = {name: value for name, value in named.items() if value is not None}
    if not found:
        raise ConfigError(
            "initialize() got no configuration; give config=..., a dict or the path of a JSON file, or args with "
            "deepspeed_config"
        )
    if len(found) > 1:
        raise ConfigError(f"initialize() got a configuration as {' and as '.join(found)}; give one of them")
    return next(iter(found.values()))


def _align_local_rank(args: Any) -> int:
    """Return this process's rank on its node, and store it in ``args.local_rank`` if ``args`` has that entry.

    Raises:
        ValueError: ``args.local_rank`` and the environment variable LOCAL_RANK differ.
    """
    given = _argument(args, "local_rank")
    known = os.environ.get("LOCAL_RANK")
    if known is None:
        return given if isinstance(given, int) and given >= 0 else 0
    if isinstance(given, int) and given >= 0 and given != int(known):
        raise ValueError(
            f"args.local_rank is {given}, and LOCAL_RANK in the environment {known}; leave one of them out"
        )
    # Scripts read args.local_rank to find the first rank of a node, and torchrun passes no such argument.
    if isinstance(args, MutableMapping) and "local_rank" in args:
        args["local_rank"] = int(known)
    elif hasattr(args, "local_rank"):
        args.local_rank = int(known)
    return int(known)


def _argument(args: Any, name: str) -> Any:
    """Return an entry of ``args``, or None if ``args`` has no such entry."""
    # Most scripts pass a namespace; some, such as OpenRLHF, pass a dict.
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def _read_config(source: Any) -> tuple[Config, dict[str, Any]]:
    """Return the checked configuration, and the same configuration as a plain dict."""
    loaded = load_config(source)
    # Return the user's own entries, because scripts look up keys of their own in engine.config.
    if isinstance(source, Mapping):
        return loaded, dict(source)
    # A file may have comments, and a string may be base64, so the dict is made from the parsed configuration.
    return loaded, json.loads(loaded.model_dump_json(exclude_unset=True, by_alias=True))


def _warn_of_no_clipping(loaded: Config, given: Mapping[str, Any]) -> None:
    """Warn once if gradient_clipping is not set, because DeepSpeed's default then clips and zeropp's does not."""
    # A value of "auto" is in ``given`` only. load_config has already warned about it.
    if "gradient_clipping" not in loaded.model_fields_set | given.keys():
        notify_once(
            "gradient_clipping is not set, so gradients are not clipped; DeepSpeed clips them to a norm of 1.0 then, "
            "since 0.19.3. Set 1.0 to clip as it does, or 0.0 to clip nothing"
        )


def _group(mpu: Any) -> Group:
    """Return the data-parallel process group of ``mpu``; None, for all ranks, if ``mpu`` is None."""
    if mpu is None:
        return None
    require_no_model_parallelism(mpu)
    return mpu.get_data_parallel_group()  # type: ignore[no-any-return]


def _device(args: Any) -> torch.device | None:
    """Return this rank's GPU; None to leave the model on its device: without a GPU, or if ``device_rank`` < 0."""
    if not torch.cuda.is_available():
        return None
    # Lightning passes the GPU's index as args.device_rank; launchers set LOCAL_RANK.
    number = _argument(args, "device_rank")
    if number is None:
        number = os.environ.get("LOCAL_RANK", torch.cuda.current_device())
    # A negative index keeps the model on the CPU of a machine that has GPUs.
    return torch.device("cuda", int(number)) if int(number) >= 0 else None


def _make_optimizer(
    loaded: Config, model: nn.Module, optimizer: Any, model_parameters: Params | None
) -> Optimizer | None:
    """Return the optimizer to wrap: given, made by a given function, or made from the configuration.

    Return None, for inference, if neither an optimizer nor a configuration of one is given.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if optimizer is None and loaded.optimizer is None:
        return None
    if isinstance(model_parameters, Tensor):
        raise TypeError("model_parameters is a Tensor; expected several, in a list, or parameter groups")
    # Frozen parameters are left out. A parameter that is unfrozen later can be added with add_param_group.
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    params: Any = list(trained if model_parameters is None else model_parameters)
    if not params:
        raise ValueError(
            "there is no parameter to make an optimizer for: none was given, or none of the model requires "
            "gradients. An engine without an optimizer freezes its model until destroy(), as Accelerate's "
            "free_memory() calls it; or call model.requires_grad_()"
        )
    if optimizer is not None:
        if not callable(optimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer, a function that makes "
                "one of parameters, or None"
            )
        return optimizer(params)  # type: ignore[no-any-return]
    assert loaded.optimizer is not None  # checked above
    return make_optimizer(loaded.optimizer, params)


def _make_scheduler(loaded: Config, optimizer: ZeroOptimizer | None, given: Any) -> Any:
    """Return the scheduler: given, made by a given function, or made from the configuration; None without any."""
    if given is None:
        if loaded.scheduler is None or optimizer is None:
            return None
        return make_scheduler(loaded.scheduler, optimizer)
    # A scheduler object has step(). A function that makes a scheduler does not; a class has step(), but is a type.
    if isinstance(given, type) or (callable(given) and not hasattr(given, "step")):
        given = given(optimizer)
    # Raise here. Otherwise the error would only come at the end of the first accumulation window.
    if not hasattr(given, "step"):
        raise TypeError(
            f"lr_scheduler is or returned {given!r}, a {type(given).__name__}; expected an object with step()"
        )
    return given
