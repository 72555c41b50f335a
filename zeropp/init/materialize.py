"""``materialize``: memory, values and shards for a model that was built on the meta device, one module at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeropp.comm.collective import run_on_all_ranks
from zeropp.comm.process_groups import Group
from zeropp.config import ConfigSource
from zeropp.init.context import make_build
from zeropp.init.settings import InitSettings, choose_group, choose_settings
from zeropp.params.sharded_build import Piece, ShardedBuild, piece_of
from zeropp.setup.placing import give_memory, without_weak_weights

__all__ = ["materialize"]

_POISON = 0x5A  # byte that marks integer tensors without values; floating-point tensors are marked with NaN

Initialize = Callable[[nn.Module], object]


def materialize(
    model: nn.Module,
    initialize: Initialize | None = None,
    *,
    buffers: Initialize | None = None,
    process_group: Group = None,
    remote_device: torch.device | str | None = None,
    config: ConfigSource = None,
) -> None:
    """Prepare a model on the meta device for ZeroOptimizer, in place. Collective.

    With ``initialize``, one module after the other gets memory and values and is sharded. No rank holds a whole large
    model. Without ``initialize``, parameters stay without values until the wrapped model loads them with
    ``zeropp.checkpoint.load_safetensors``, ``load`` or ``load_state_dict``. Each rank then reads its own shards. A
    forward before that raises an error.

    Args:
        model: model to prepare. Its parameters that are not on the meta device are sharded with their values.
        initialize: function that initialises a module, such as ``lambda module: module.reset_parameters()``. It is
            called on every rank with each module that has tensors without values. All ranks get rank 0's values.
        buffers: without ``initialize``, a function that fills a module's non-persistent buffers, which no checkpoint
            contains, such as ``model._init_weights`` of transformers. The module's parameters are on the meta device.
        process_group: ranks to shard over; None for all ranks.
        remote_device: storage of the shards until the model is wrapped, as for :class:`zeropp.zero.Init`.
        config: configuration as for ZeroOptimizer.

    Raises:
        TypeError, ValueError: an argument is invalid, the shards exceed ``host_memory_limit``, or a tensor that
            ``initialize`` or ``buffers`` must fill has no values, or NaN.
    """
    group = choose_group(process_group, None, None)

    def choose() -> InitSettings:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
        return choose_settings(
            group=group, remote_device=remote_device, pin_memory=False, config_dict_or_path=config, config=None,
            dtype=None, hpz_group=None, asked={},
        )  # fmt: skip

    settings = run_on_all_ranks(group, "preparing materialize", choose, patience=lambda chosen: chosen.seconds)
    build = make_build(settings)
    build.building = True
    try:
        with torch.no_grad(), without_weak_weights(model):
            # Without `initialize`, meta parameters get no shards before the model is wrapped, so nothing is checked.
            settings.limit.require(model.parameters() if initialize is not None else ())
            for path, module in model.named_modules():
                name = path or type(module).__name__
                if initialize is None:
                    _await(module, name, build, buffers)
                else:
                    _initialize(module, name, _without_values(module), initialize)
                own = ((f"{name}.{key}", each, module) for key, each in module._parameters.items() if each is not None)
                build.ready(own)
    except BaseException as error:
        build.end_build()
        build.report_failure(error)
        raise
    build.finish_build()


def _without_values(module: nn.Module) -> dict[str, Tensor]:
    own = (*module._parameters.items(), *module._buffers.items())
    return {key: each for key, each in own if each is not None and each.is_meta and piece_of(each) is None}


def _initialize(module: nn.Module, name: str, tensors: dict[str, Tensor], initialize: Initialize) -> None:
    """Give a module's tensors memory, call the initialising function, and check that it has filled all of them."""
    if not tensors:
        return
    for tensor in tensors.values():
        give_memory(tensor, torch.device("cpu"))
        _poison(tensor)
    initialize(module)
    # Look the tensors up by name again, because the function may have replaced them.
    now = {**module._parameters, **module._buffers}
    left = [f"{name}.{key}" for key in tensors if (found := now.get(key)) is not None and _is_poisoned(found)]
    if left:
        raise ValueError(
            f"the function that initialises left {left} without values, or gave them NaN; it is called with each "
            f"module that has tensors without values, here a {type(module).__name__}"
        )


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    else:
        tensor.untyped_storage().fill_(_POISON)  # type: ignore[attr-defined]  # torch's stubs lack it


def _is_poisoned(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    found = tensor.reshape(-1).view(torch.uint8).view(-1, tensor.element_size()).eq(_POISON).all(-1)
    # Values with one byte per element may equal the marker by chance. So count such a tensor only if all bytes match.
    return bool(found.any() if tensor.element_size() > 1 else found.all() and found.numel())


def _await(module: nn.Module, name: str, build: ShardedBuild, buffers: Initialize | None) -> None:
    """Mark a module's floating parameters as awaiting a load, give other tensors memory, and fill some buffers.

    The filled buffers are the non-persistent ones, which no checkpoint contains.
    """
    tensors = _without_values(module)
    missing = {key: each for key, each in tensors.items() if key in module._non_persistent_buffers_set}
    if missing and buffers is None:
        raise ValueError(
            f"buffer {name}.{next(iter(missing))} is on the meta device and in no file, since it is not persistent; "
            "give a function that fills it, materialize(model, buffers=...), which for models of transformers is "
            "model._init_weights; or initialize"
        )
    for key, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            Piece(build, f"{name}.{key}", awaited=True).tie(tensor)
        elif key not in missing:
            give_memory(tensor, torch.device("cpu"))
            # NaN lets the check before the first forward find floating buffers that were not loaded.
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    if missing and buffers is not None:
        _initialize(module, name, missing, buffers)
