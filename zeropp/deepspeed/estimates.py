"""DeepSpeed's memory estimators under DeepSpeed's names, computed with :func:`zeropp.plan.memory`.

All estimates are bytes that zeropp's engine owns in bf16 training with AdamW and otherwise default settings.

Bytes of a device: everything that stays there between steps; two gathered units, because backward computes with one
while the next one is gathered; and the gradients of the largest unit twice, once as autograd returns them and once as
the message that is reduced.

Bytes of a host: the sum over one node's ranks. The larger of two moments counts: building the model, or training it.

Activations, buffers, allocator rounding and communicators (:data:`zeropp.plan.COMMUNICATOR_NBYTES`) are not included.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from zeropp.params.guard import own_dtype
from zeropp.plan.memory import memory

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

_GIB = 2**30
_MOST_LAYERS = 1024


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Estimate the memory of model states in stage 2, in bf16 with AdamW.

    Args:
        total_params: number of elements of the model, all trained; floats such as ``2851e6`` are accepted. The
            estimated model has 64 equal units.
        num_gpus_per_node: ranks per node.
        num_nodes: number of nodes.
        cpu_offload: True if optimizer states, main weights and gradients are on the host.
        additional_buffer_factor: factor on the host's bytes, for memory that the estimate leaves out. The device's
            bytes are not multiplied.

    Returns:
        Bytes of one node's host, and bytes of each device.

    Raises:
        TypeError, ValueError: one of the first three arguments is not a whole number of at least 1.
    """
    model = _layers(total_params, None)
    machines = _machines(num_gpus_per_node, num_nodes)
    return _needs(model, 2, machines, additional_buffer_factor, cpu_offload)[:2]


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table of memory estimates of a given model in stage 2, with and without offload.

    Args:
        model: model that is not wrapped; its parameters may be on the meta device.
        num_gpus_per_node: ranks per node.
        num_nodes: number of nodes.
        additional_buffer_factor: factor on the host's bytes, for memory that the estimate leaves out.
    """
    _print_table(model, 2, _machines(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table of memory estimates of a model of given size in stage 2, with and without offload.

    The arguments are those of :func:`estimate_zero2_model_states_mem_needs`.
    """
    _print_table(_layers(total_params, None), 2, _machines(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Estimate the memory of model states in stage 3, in bf16 with AdamW.

    Args:
        total_params: number of elements of the model, all trained; floats such as ``2851e6`` are accepted.
        largest_layer_params: number of elements of the largest unit. In zeropp a unit is a whole block of a
            ``ModuleList``; in DeepSpeed it is one ``Linear``. The estimated model has equal units of this size, but at
            most 1,024 units.
        num_gpus_per_node: ranks per node.
        num_nodes: number of nodes.
        cpu_offload: True if optimizer states, main weights and gradients are on the host. The device then keeps a
            16-bit shard of the weights.
        cpu_offload_params: True if the 16-bit shard is on the host as well. No effect without ``cpu_offload``, as in
            DeepSpeed.
        zero_init: True if the model is built inside :class:`zeropp.zero.Init`, one unit at a time. Otherwise each rank
            builds the whole model.
        additional_buffer_factor: factor on the host's bytes, for memory that the estimate leaves out. The device's
            bytes are not multiplied.

    Returns:
        Bytes of one node's host, bytes of each device, and the part of the device's bytes that gathered units and
        their gradients take.

    Raises:
        TypeError, ValueError: a number of parameters, ranks or nodes is not a whole number of at least 1, or the
            largest unit has more elements than the model.
    """
    model = _layers(total_params, largest_layer_params)
    machines = _machines(num_gpus_per_node, num_nodes)
    return _needs(model, 3, machines, additional_buffer_factor, cpu_offload, cpu_offload_params, zero_init)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table of memory estimates of a given model in stage 3, for each setting of offload and ``zero_init``.

    Args:
        model: model that is not wrapped; its parameters may be on the meta device.
        num_gpus_per_node: ranks per node.
        num_nodes: number of nodes.
        additional_buffer_factor: factor on the host's bytes, for memory that the estimate leaves out.
    """
    _print_table(model, 3, _machines(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print a table of memory estimates of a model of given size in stage 3, for each setting of offload and zero_init.

    The arguments are those of :func:`estimate_zero3_model_states_mem_needs`.
    """
    model = _layers(total_params, largest_layer_params)
    _print_table(model, 3, _machines(num_gpus_per_node, num_nodes), additional_buffer_factor)


def _needs(
    model: nn.Module,
    stage: int,
    machines: tuple[int, int],
    factor: float,
    cpu_offload: bool,
    cpu_offload_params: bool = False,
    zero_init: bool = False,
) -> tuple[int, int, int]:
    """Return bytes of a node's host, bytes of a device, and the device's bytes for gathered units and gradients.

    Args:
        model: model that is not wrapped.
        stage: ZeRO stage, 2 or 3.
        machines: ranks per node, and number of nodes.
        factor: factor on the host's bytes.
        cpu_offload: True to offload optimizer states, main weights and gradients to the host.
        cpu_offload_params: True to offload the 16-bit shard as well.
        zero_init: True if the model is built inside ``zero.Init``.
    """
    local, nodes = machines
    zero: dict[str, object] = {"stage": stage}
    if cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if cpu_offload_params:
            zero["offload_param"] = {"device": "cpu"}
    plan = memory(model, {"zero_optimization": zero, "bf16": {"enabled": True}}, local * nodes, local)

    working = 2 * plan.largest_unit + 2 * max((unit.message for unit in plan.units), default=0)
    # With offload, one reduced gradient is copied to the host while the next one is computed.
    arriving = 2 * max((unit.arriving for unit in plan.units), default=0)
    device = plan.total + plan.gradients + plan.device_states + working + arriving

    built = sum(p.numel() * own_dtype(p).itemsize for p in model.parameters())
    if zero_init:
        # zero.Init builds one unit in float32 at a time: twice the bytes of a gathered bf16 unit. The offloaded shards
        # of the units built before are on the host at that time, too.
        built = 2 * max((unit.gathered for unit in plan.units), default=0)
        built += sum(plan.host.get(term, 0) for term in ("main_weights", "frozen_weights", "wire_weights"))
    return math.ceil(max(plan.host_total, built) * local * factor), device, working


def _print_table(model: nn.Module, stage: int, machines: tuple[int, int], factor: float) -> None:
    """Print a row of estimates for each combination of settings, starting with the most offload."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module, on any device, also meta")
    names = ("cpu_offload", "cpu_offload_params", "zero_init")[: 1 if stage == 2 else 3]
    rows: list[tuple[bool, ...]] = [(True,), (False,)]
    if stage == 3:
        rows = [(*offload, init) for offload in ((True, True), (True, False), (False, False)) for init in (True, False)]
    total = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    local, nodes = machines
    print(f"Model states of zeropp in stage {stage}, bf16 and AdamW: {total:,} parameters, {nodes} x {local} GPUs")
    print(f"{'per CPU':>14} | {'per GPU':>14} | settings")
    for row in rows:
        host, device, _ = _needs(model, stage, machines, factor, *row)
        settings = ", ".join(f"{name}={value}" for name, value in zip(names, row, strict=True))
        print(f"{host / _GIB:>10.2f} GiB | {device / _GIB:>10.2f} GiB | {settings}")


def _layers(total_params: float, largest_layer_params: float | None) -> nn.Module:
    """Return a model on the meta device with ``total_params`` elements, in layers of ``largest_layer_params`` elements.

    If ``largest_layer_params`` is None, the model has at most 64 layers of equal size.
    """
    total = _count("total_params", total_params)
    largest = -(-total // 64) if largest_layer_params is None else _count("largest_layer_params", largest_layer_params)
    if largest > total:
        raise ValueError(f"largest_layer_params is {largest:,}; expected at most total_params, which is {total:,}")
    # At most _MOST_LAYERS layers: smaller layers hardly change the estimate, and millions of them take minutes.
    largest = max(largest, -(-total // _MOST_LAYERS))
    sizes = [min(largest, total - begin) for begin in range(0, total, largest)]
    return nn.ModuleList(nn.Linear(1, size, bias=False, device=torch.device("meta")) for size in sizes)


def _machines(num_gpus_per_node: int, num_nodes: int) -> tuple[int, int]:
    """Return the checked numbers of ranks per node and of nodes."""
    return _count("num_gpus_per_node", num_gpus_per_node), _count("num_nodes", num_nodes)


def _count(name: str, value: float) -> int:
    """Return ``value`` as an int; raise TypeError or ValueError if it is not a whole number of at least 1."""
    # bool is a subclass of int, and here a mistake.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; expected a whole number of at least 1")
    if not 1 <= value < math.inf or value != int(value):
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")
    return int(value)
