"""DeepSpeed's memory estimators, by the names that notebooks know: tables and totals of :func:`zeropp.plan.memory`.

The bytes are those that this engine owns in bf16 training with AdamW and otherwise default settings. The device's hold
what stays there between steps, two gathered units (backward computes with one while the next arrives) and the gradients
of one unit twice (as autograd leaves them, and as the message). The host's are those of one node, at the time of the
most: while its ranks build the model, or while they train it. Activations, buffers, allocator rounding and
communicators (:data:`zeropp.plan.COMMUNICATOR_NBYTES`) are not included.
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
        total_params: elements of the model, all trained; floats such as ``2851e6`` are accepted. The estimated
            model has 64 equal units.
        num_gpus_per_node: ranks of each node.
        num_nodes: nodes.
        cpu_offload: optimizer states, main weights and gradients are on the host.
        additional_buffer_factor: multiplies the host's number, for memory that is not counted. The device's number is
            not multiplied.

    Returns:
        Bytes of one node's host, and bytes of each device.

    Raises:
        TypeError, ValueError: an argument is no whole number of at least 1.
    """
    model = _layers(total_params, None)
    machines = _machines(num_gpus_per_node, num_nodes)
    return _needs(model, 2, machines, additional_buffer_factor, cpu_offload)[:2]


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of a model for stage 2, with and without offload.

    ``model`` is not wrapped and may have meta parameters; the other arguments are those of
    :func:`estimate_zero2_model_states_mem_needs`.
    """
    _print_table(model, 2, _machines(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print :func:`estimate_zero2_model_states_mem_needs` with and without offload; the arguments are the same."""
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
        total_params: elements of the model, all trained; floats such as ``2851e6`` are accepted.
        largest_layer_params: elements of its largest unit, which is a whole block of a ``ModuleList`` and not one
            ``Linear`` as in DeepSpeed. The estimated model has equal units of this size, at most 1,024 of them.
        num_gpus_per_node: ranks of each node.
        num_nodes: nodes.
        cpu_offload: optimizer states, main weights and gradients are on the host; the device keeps a 16-bit shard.
        cpu_offload_params: that shard is on the host as well. It has no effect without ``cpu_offload``, as in
            DeepSpeed.
        zero_init: the model is built inside :class:`zeropp.zero.Init`, one unit at a time; otherwise each rank builds
            the whole model.
        additional_buffer_factor: multiplies the host's number, for memory that is not counted. The device's number is
            not multiplied.

    Returns:
        Bytes of one node's host; bytes of each device; bytes of the device's that gathered units and their gradients
        take.

    Raises:
        TypeError, ValueError: an argument is no whole number of at least 1, or the largest unit exceeds the model.
    """
    model = _layers(total_params, largest_layer_params)
    machines = _machines(num_gpus_per_node, num_nodes)
    return _needs(model, 3, machines, additional_buffer_factor, cpu_offload, cpu_offload_params, zero_init)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the estimates of a model for stage 3, for each combination of offload and ``zero_init``.

    ``model`` is not wrapped and may have meta parameters; the other arguments are those of
    :func:`estimate_zero3_model_states_mem_needs`.
    """
    _print_table(model, 3, _machines(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print :func:`estimate_zero3_model_states_mem_needs` for each combination of offload and ``zero_init``.

    The arguments are the same.
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
    """Bytes of a node's host, of a device, and of the device's for gathered units and their gradients."""
    local, nodes = machines
    zero: dict[str, object] = {"stage": stage}
    if cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if cpu_offload_params:
            zero["offload_param"] = {"device": "cpu"}
    plan = memory(model, {"zero_optimization": zero, "bf16": {"enabled": True}}, local * nodes, local)

    working = 2 * plan.largest_unit + 2 * max((unit.message for unit in plan.units), default=0)
    # One sum of gradients leaves for the host while the next is made.
    arriving = 2 * max((unit.arriving for unit in plan.units), default=0)
    device = plan.total + plan.device_states + working + arriving

    built = sum(p.numel() * own_dtype(p).itemsize for p in model.parameters())
    if zero_init:
        # Init builds one unit in float32, beside the offloaded pieces of the units before it.
        built = 2 * max((unit.gathered for unit in plan.units), default=0)
        built += sum(plan.host.get(term, 0) for term in ("main_weights", "frozen_weights", "wire_weights"))
    return math.ceil(max(plan.host_total, built) * local * factor), device, working


def _print_table(model: nn.Module, stage: int, machines: tuple[int, int], factor: float) -> None:
    """Print a row for each combination of settings, those that offload most first."""
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
    """A model of ``total_params`` on the meta device, in layers of ``largest_layer_params``; None for 64 layers."""
    total = _count("total_params", total_params)
    largest = -(-total // 64) if largest_layer_params is None else _count("largest_layer_params", largest_layer_params)
    if largest > total:
        raise ValueError(f"largest_layer_params is {largest:,}; expected at most total_params, which is {total:,}")
    # A layer below this share of the model adds nothing to speak of, and millions of them take minutes.
    largest = max(largest, -(-total // _MOST_LAYERS))
    sizes = [min(largest, total - begin) for begin in range(0, total, largest)]
    return nn.ModuleList(nn.Linear(1, size, bias=False, device=torch.device("meta")) for size in sizes)


def _machines(num_gpus_per_node: int, num_nodes: int) -> tuple[int, int]:
    """Ranks of a node, and nodes."""
    return _count("num_gpus_per_node", num_gpus_per_node), _count("num_nodes", num_nodes)


def _count(name: str, value: float) -> int:
    # A truth value is an integer to Python, and a mistake here.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; expected a whole number of at least 1")
    if not 1 <= value < math.inf or value != int(value):
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")
    return int(value)
