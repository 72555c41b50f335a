"""``materialize``: a model that was built on the meta device, brought to pieces module by module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeropp.comm.members import Group
from zeropp.config import ConfigSource
from zeropp.init.context import make_spread
from zeropp.init.settings import choose_settings
from zeropp.params.piece import Piece, piece_of
from zeropp.params.spread import Spread
from zeropp.setup.placing import give_memory, without_weak_weights

__all__ = ["materialize"]

_Named = list[tuple[str, Tensor]]


def materialize(
    model: nn.Module,
    initialize: Callable[[nn.Module], object] | None = None,
    *,
    process_group: Group = None,
    remote_device: str | None = None,
    config: ConfigSource = None,
) -> None:
    """Prepare a model on the meta device for ZeroOptimizer, in place; no rank ever has all of it. Collective.

    With ``initialize``, each module's own parameters and buffers get memory in turn, then values, and are partitioned.
    Without, parameters have no values before the wrapped model gets them by ``zeropp.checkpoint.load_safetensors``,
    ``load`` or ``load_state_dict``, of which each rank reads its part; a forward before that is refused.

    Args:
        model: what of it is not on the meta device is partitioned as it is.
        initialize: called with each module that has parameters or buffers without values, on every rank; as
            ``lambda module: module.reset_parameters()``. Rank 0's values become everyone's.
        process_group: ranks to partition among; None for the world.
        remote_device: as for :class:`zeropp.zero.Init`.
        config: as for ZeroOptimizer.

    Raises:
        ValueError: a tensor has no values afterwards and will not be loaded either, by name.
    """
    settings = choose_settings(
        data_parallel_group=process_group, sequence_data_parallel_group=None, remote_device=remote_device,
        pin_memory=False, config_dict_or_path=config, config=None, dtype=None, mpu=None, hpz_group=None, asked={},
    )  # fmt: skip
    spread = make_spread(settings)
    spread.building = True
    try:
        with torch.no_grad(), without_weak_weights(model):
            for path, module in model.named_modules():
                name = path or type(module).__name__
                if initialize is None:
                    _await(module, name, spread)
                else:
                    _initialize(module, name, initialize)
                own = ((f"{name}.{key}", each, module) for key, each in module._parameters.items() if each is not None)
                spread.ready(own)
            spread.finish()
    except BaseException as error:
        spread.give_up(error)
        raise


def _without_values(module: nn.Module) -> _Named:
    own = (*module._parameters.items(), *module._buffers.items())
    return [(key, each) for key, each in own if each is not None and each.is_meta and piece_of(each) is None]


def _initialize(module: nn.Module, name: str, initialize: Callable[[nn.Module], object]) -> None:
    tensors = _without_values(module)
    if not tensors:
        return
    for _, tensor in tensors:
        give_memory(tensor, torch.device("cpu"))
        if tensor.is_floating_point():
            # To find afterwards what nobody has initialised.
            tensor.fill_(float("nan"))
    initialize(module)
    left = [f"{name}.{key}" for key, tensor in tensors if tensor.is_floating_point() and bool(tensor.isnan().any())]
    if left:
        raise ValueError(
            f"initialize left {left} without values, or gave them NaN; it is called with each module that has tensors "
            f"without values, here a {type(module).__name__}"
        )


def _await(module: nn.Module, name: str, spread: Spread) -> None:
    for key, tensor in _without_values(module):
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            Piece(spread, f"{name}.{key}", awaited=True).tie(tensor)
        elif not isinstance(tensor, nn.Parameter) and key in module._non_persistent_buffers_set:
            raise ValueError(
                f"buffer {name}.{key} is on the meta device and in no file, since it is not persistent; build the "
                "model with its buffers on the CPU, or give initialize"
            )
        else:
            give_memory(tensor, torch.device("cpu"))
            tensor.zero_()
