"""``initialize``: from a model and a configuration to an engine that trains, by DeepSpeed's call."""

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
    """Partition a model, and put everything that trains it behind one engine. Collective.

    Arguments and results are those of ``deepspeed.initialize``.

    Args:
        args: a namespace or dict; of it ``deepspeed_config``, in place of ``config``, and ``device_rank``, the GPU's
            number on its node; negative for where the model is.
        model: to partition in place; rank 0's values become everyone's. It goes to this rank's GPU, if there is one.
        optimizer: elementwise, over parameters of the model; or what makes one of parameters. None for that of the
            configuration, or for inference if there is none there, either.
        model_parameters: that are trained, tensors or groups, where the optimizer is made here; None for all that
            require gradients.
        training_data: a data set, of which a loader is made.
        lr_scheduler: of the optimizer, stepped by the engine; or what makes one of it. None for the configuration's.
        distributed_port: of the first rank, where no launcher names one.
        mpu: an object with ``get_data_parallel_group()``, over which the model is partitioned.
        dist_init_required: False to insist on a process group that is there already.
        collate_fn: makes a batch of samples.
        config: a dict, the path of a JSON file, or base64 of JSON.
        mesh_param: refused; give a group by ``mpu``.
        config_params: an older name of ``config``.

    Returns:
        The engine; its ``ZeroOptimizer``, or None; the loader, or None; the scheduler, or None.

    Raises:
        ConfigError, TypeError, ValueError: something cannot be used; on every rank.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if mesh_param is not None:
        raise ValueError("mesh_param is not in zeropp, which partitions over one group of ranks; give it by mpu")
    loaded, given = _read_config(_chosen_config(args, config, config_params))
    # Before anything is asked of ranks; a wrong file is an error without them.
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
    """Partition the model; its optimizer, unless it is for inference, and what gathers and reduces."""
    # The engine has made what these name; whoever wraps the model refuses what it cannot make.
    rest = loaded.model_copy(update={"optimizer": None, "scheduler": None})
    # A model that was built in pieces knows where it is going to train.
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
    """The configuration that was given, in one of three places."""
    named = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": _argument(args, "deepspeed_config"),
        # The project's name before it was DeepSpeed, which still reads it.
        "args.deepscale_config": _argument(args, "deepscale_config"),
    }
    # Two of them may say different things, and either would be a guess.
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
    """This process's number on its node, which ``args`` has afterwards, too.

    Raises:
        ValueError: ``args`` has another one than the launcher's variable.
    """
    given = _argument(args, "local_rank")
    known = os.environ.get("LOCAL_RANK")
    if known is None:
        return given if isinstance(given, int) and given >= 0 else 0
    if isinstance(given, int) and given >= 0 and given != int(known):
        raise ValueError(
            f"args.local_rank is {given}, and LOCAL_RANK in the environment {known}; leave one of them out"
        )
    # Scripts ask it for the first rank of a node, and torchrun passes no such argument.
    if isinstance(args, MutableMapping) and "local_rank" in args:
        args["local_rank"] = int(known)
    elif hasattr(args, "local_rank"):
        args.local_rank = int(known)
    return int(known)


def _argument(args: Any, name: str) -> Any:
    # OpenRLHF and others pass a dict where the rest of the world has a namespace.
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def _read_config(source: Any) -> tuple[Config, dict[str, Any]]:
    """The configuration, checked, and as a plain dict."""
    loaded = load_config(source)
    # Scripts look into it for keys of their own, as trainers leave them.
    if isinstance(source, Mapping):
        return loaded, dict(source)
    # Comments and base64 have been read by then; what is not set is not in it.
    return loaded, json.loads(loaded.model_dump_json(exclude_unset=True, by_alias=True))


def _warn_of_no_clipping(loaded: Config, given: Mapping[str, Any]) -> None:
    # In a file's place `given` is what was loaded. "auto" has been named before.
    if "gradient_clipping" not in loaded.model_fields_set | given.keys():
        notify_once(
            "gradient_clipping is not set, so gradients are not clipped; DeepSpeed clips them to a norm of 1.0 then, "
            "since 0.19.3. Set 1.0 to clip as it does, or 0.0 to clip nothing"
        )


def _group(mpu: Any) -> Group:
    if mpu is None:
        return None
    require_no_model_parallelism(mpu)
    return mpu.get_data_parallel_group()  # type: ignore[no-any-return]


def _device(args: Any) -> torch.device | None:
    """This rank's GPU; None for where the model is, as with a negative ``device_rank``."""
    if not torch.cuda.is_available():
        return None
    # Lightning says so by this name; launchers by the variable.
    number = _argument(args, "device_rank")
    if number is None:
        number = os.environ.get("LOCAL_RANK", torch.cuda.current_device())
    # A trainer may be told to stay on the CPU of a machine that has GPUs.
    return torch.device("cuda", int(number)) if int(number) >= 0 else None


def _make_optimizer(
    loaded: Config, model: nn.Module, optimizer: Any, model_parameters: Params | None
) -> Optimizer | None:
    if isinstance(optimizer, Optimizer):
        return optimizer
    if optimizer is None and loaded.optimizer is None:
        return None
    if isinstance(model_parameters, Tensor):
        raise TypeError("model_parameters is a Tensor; expected several, in a list, or parameter groups")
    # Frozen ones would be slices without gradients; a group of those that are unfrozen later can be added.
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    params: Any = list(trained if model_parameters is None else model_parameters)
    if not params:
        raise ValueError(
            "there is an optimizer to make, and no parameter for it: none was given, or none of the model requires "
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
    assert loaded.optimizer is not None  # asked above
    return make_optimizer(loaded.optimizer, params)


def _make_scheduler(loaded: Config, optimizer: ZeroOptimizer | None, given: Any) -> Any:
    if given is None:
        if loaded.scheduler is None or optimizer is None:
            return None
        return make_scheduler(loaded.scheduler, optimizer)
    # A scheduler has step(); a class or function that makes one has not, or not as an object's.
    if isinstance(given, type) or (callable(given) and not hasattr(given, "step")):
        given = given(optimizer)
    # Now, and not at the end of the first window.
    if not hasattr(given, "step"):
        raise TypeError(f"lr_scheduler is or made {given!r}, a {type(given).__name__}; expected an object with step()")
    return given
