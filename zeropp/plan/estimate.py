"""Memory of hosts and devices from a few numbers alone, under the names that DeepSpeed's estimators have.

The names, arguments and results are known from notebooks; the bytes are those of this engine: bf16 training with AdamW,
which is 4 bytes an element for main weights, 4 for gradients and 8 for states, all of them spread over the ranks, and
what is gathered in 16 bits. Activations, buffers, what an allocator rounds up and communicators
(:data:`zeropp.plan.COMMUNICATOR_NBYTES`) are in none of these numbers.

[Note: where model states lie] ``cpu_offload`` has main weights, gradients and states on the host; the device keeps
weights in 16 bits, whole in stage 2 and a shard of those that are gathered in stage 3. ``cpu_offload_params`` has that
shard, and frozen ones, on the host as well: the device keeps persistent weights and what is gathered.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeropp.params.guard import own_dtype
from zeropp.plan.memory import memory
from zeropp.wire.report import report_nbytes

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

_HALF, _MAIN = torch.bfloat16.itemsize, torch.float32.itemsize
_GIB = 2**30


@dataclass(frozen=True)
class _Nodes:
    """The machines: so many nodes, with so many ranks each."""

    local: int
    nodes: int

    @property
    def world(self) -> int:
        """All ranks."""
        return self.local * self.nodes

    def __str__(self) -> str:
        return f"{self.nodes} x {self.local} GPUs"


@dataclass(frozen=True)
class _Settings:
    """Where model states lie, and whether no process builds the whole model."""

    cpu_offload: bool
    cpu_offload_params: bool
    zero_init: bool


@dataclass(frozen=True)
class _Bytes:
    """What there is of a model, in bytes, wherever it lies: on one rank, or of its largest unit."""

    main: int  # main weights
    gradients: int  # and the norms of their blocks
    frozen: int  # shards in their own dtype
    whole: int  # 16-bit weights that stay whole between uses
    shard: int  # 16-bit pieces of trained weights that are gathered, which there are where main weights are elsewhere
    unit: int  # the largest unit's 16-bit weights, gathered
    message: int  # the largest unit's 16-bit gradients
    built: int  # the whole model, as a process builds it without Init

    @property
    def stepped(self) -> int:
        """Main weights, gradients and AdamW's states, which are two more of the main dtype."""
        # States are made like what is stepped, which is the main weights, and so they have their dtype and padding.
        return self.main + self.gradients + 2 * self.main

    @property
    def largest_layer(self) -> int:
        """What forward and backward need on top: the least with which gathers run ahead."""
        # Backward computes with one unit while another is on its way. The gradients of a unit are there twice when
        # they are packed: as autograd left them, and as the message.
        return 2 * self.unit + 2 * self.message

    def needs(self, settings: _Settings, machines: _Nodes, factor: float) -> tuple[int, int]:
        """Bytes of a node's host, and of a device; see [Note: where model states lie]."""
        # Between steps a host has nothing of a model that trains on a device.
        host, device = 0, self.whole + self.frozen + self.stepped
        if settings.cpu_offload:
            host, device = self.stepped, self.whole + self.frozen + self.shard
            # Only here: without the former there is no second, 16-bit shard that could lie elsewhere.
            if settings.cpu_offload_params:
                host, device = host + self.frozen + self.shard, self.whole
            # Sums of gradients wait on the device for their way to the host: one leaves while the next is summed.
            device += 2 * (self.message // _HALF * _MAIN // machines.world)
        # Each process builds a model of its own. It is cut up while it is wrapped, before there are states, so the
        # host never has both.
        building = self.built
        if settings.zero_init:
            pieces = host - self.stepped + self.main if settings.cpu_offload else 0
            building = self.unit // _HALF * _MAIN + pieces
        return math.ceil(max(host, building) * machines.local * factor), device + self.largest_layer


def _of_counts(total: int, largest: int, stage: int, machines: _Nodes) -> _Bytes:
    """All trained, in one flat buffer; in stage 3 nothing is persistent. ``largest`` is 0 where it is not known."""
    # Pieces are equal, so the last one is padded.
    piece = -(-total // machines.world)
    return _Bytes(
        main=piece * _MAIN,
        gradients=piece * _MAIN + report_nbytes(piece, torch.float32),
        frozen=0,
        whole=total * _HALF if stage == 2 else 0,
        shard=piece * _HALF if stage == 3 else 0,
        unit=largest * _HALF if stage == 3 else 0,
        message=largest * _HALF,
        built=total * _MAIN,
    )


def _of_model(model: nn.Module, stage: int, machines: _Nodes) -> _Bytes:
    """A model as the engine would cut it, padding and all."""
    # What decides dtypes and placement; the rest stays at its defaults, under which most models train.
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    plan = memory(model, config, machines.world, machines.local)
    return _Bytes(
        main=plan.terms["main_weights"],
        gradients=plan.terms["gradients"] + plan.terms["gradient_norms"],
        frozen=plan.terms["frozen_weights"],
        whole=plan.terms["persistent_weights"],
        # A message has the trained elements of its unit, in the dtype that they are gathered in.
        shard=sum(unit.message for unit in plan.units if not unit.persistent) // machines.world,
        unit=plan.largest_unit,
        message=max(unit.message for unit in plan.units),
        built=sum(p.numel() * own_dtype(p).itemsize for p in model.parameters()),
    )


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Estimate what model states take in stage 2, in bf16 with AdamW.

    Other than DeepSpeed's: main weights, gradients and states are all spread over the ranks, 16 bytes an element
    together (and 1/64 for norms), beside 2 for the weights that every device has whole. There is no fixed bucket. What
    travels of one unit's gradients, 4 bytes an element of the largest unit, comes on top, since it cannot be known from
    these numbers; ``estimate_zero2_model_states_mem_needs_all_live`` counts it.

    Args:
        total_params: elements of the model, all trained; whole numbers such as ``2851e6``, too.
        num_gpus_per_node: ranks of each node.
        num_nodes: nodes.
        cpu_offload: main weights, gradients and states are on the host.
        additional_buffer_factor: by which the host's number is larger than what is counted, for page-locked staging
            and the like; 1 for the bytes alone. The device's is not multiplied.

    Returns:
        Bytes of a node's host, for all its ranks, at their most: each process has built the whole model in float32, or
        has its share of what is offloaded. Then bytes of each device.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """
    machines, factor = _check_machines(num_gpus_per_node, num_nodes), _check_factor(additional_buffer_factor)
    settings = _Settings(_check_flag("cpu_offload", cpu_offload), False, False)
    return _of_counts(_check_count("total_params", total_params), 0, 2, machines).needs(settings, machines, factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what a model's states take in stage 2, with and without offload.

    Other than DeepSpeed's: the model is cut as the engine would cut it, so that padding, frozen parameters and the
    largest unit's gradients are in the numbers.

    Args:
        model: not wrapped; meta parameters will do.
        num_gpus_per_node, num_nodes, additional_buffer_factor: as for ``estimate_zero2_model_states_mem_needs``.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """
    machines, factor = _check_machines(num_gpus_per_node, num_nodes), _check_factor(additional_buffer_factor)
    total = _check_model(model)
    _print_table(2, total, None, _of_model(model, 2, machines), machines, factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ``estimate_zero2_model_states_mem_needs`` says, with and without offload; arguments as there.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """
    machines, factor = _check_machines(num_gpus_per_node, num_nodes), _check_factor(additional_buffer_factor)
    total = _check_count("total_params", total_params)
    _print_table(2, total, None, _of_counts(total, 0, 2, machines), machines, factor)


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
    """Estimate what model states take in stage 3, in bf16 with AdamW.

    Other than DeepSpeed's: a layer is a unit, that is what is gathered at once, so a whole block of a ``ModuleList``
    rather than one ``Linear``; and it counts 8 bytes an element, for two gathered units (the second is on its way) and
    their gradients twice (autograd's, and the message). 16 bytes an element and 1/64 are spread over the ranks.
    Persistent weights, 2 bytes each on every device, cannot be known from these numbers;
    ``estimate_zero3_model_states_mem_needs_all_live`` counts them. It is the least: up to
    ``stage3_max_live_parameters`` elements stay gathered, and as many as ``stage3_prefetch_bucket_size`` are on their
    way, where the configuration lets them.

    Args:
        total_params: elements of the model, all trained; whole numbers such as ``2851e6``, too.
        largest_layer_params: those of its largest unit.
        num_gpus_per_node: ranks of each node.
        num_nodes: nodes.
        cpu_offload: main weights, gradients and states are on the host, the device keeps a shard in 16 bits.
        cpu_offload_params: that shard is on the host, too. Without ``cpu_offload`` it is without effect, as in
            DeepSpeed.
        zero_init: the model is built inside :class:`zeropp.zero.Init` (with ``remote_device="cpu"`` where it is
            offloaded), so a process has one unit in float32 and its pieces while it builds; False, or a single rank:
            the whole model.
        additional_buffer_factor: by which the host's number is larger than what is counted, for page-locked staging
            and the like; 1 for the bytes alone. The device's is not multiplied.

    Returns:
        Bytes of a node's host, for all its ranks, at their most: while they build the model, or train it. Bytes of each
        device. Bytes of the device's that are there for the largest unit, while forward and backward run.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """
    machines, factor = _check_machines(num_gpus_per_node, num_nodes), _check_factor(additional_buffer_factor)
    settings = _Settings(
        _check_flag("cpu_offload", cpu_offload),
        _check_flag("cpu_offload_params", cpu_offload_params),
        _check_flag("zero_init", zero_init),
    )
    own = _of_counts(*_check_counts(total_params, largest_layer_params), 3, machines)
    return (*own.needs(settings, machines, factor), own.largest_layer)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what a model's states take in stage 3, for each combination of offload and ``zero_init``.

    Other than DeepSpeed's: the model is cut as the engine would cut it by default, so that padding, persistent weights
    and frozen parameters are in the numbers.

    Args:
        model: not wrapped; meta parameters will do.
        num_gpus_per_node, num_nodes, additional_buffer_factor: as for ``estimate_zero3_model_states_mem_needs``.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """
    machines, factor = _check_machines(num_gpus_per_node, num_nodes), _check_factor(additional_buffer_factor)
    total = _check_model(model)
    own = _of_model(model, 3, machines)
    _print_table(3, total, own.unit // _HALF, own, machines, factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print what ``estimate_zero3_model_states_mem_needs`` says, for each combination of offload and ``zero_init``.

    Arguments as there.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """
    machines, factor = _check_machines(num_gpus_per_node, num_nodes), _check_factor(additional_buffer_factor)
    total, largest = _check_counts(total_params, largest_layer_params)
    _print_table(3, total, largest, _of_counts(total, largest, 3, machines), machines, factor)


def _print_table(stage: int, total: int, largest: int | None, own: _Bytes, machines: _Nodes, factor: float) -> None:
    """A row for each combination of settings; ``largest`` is in elements."""
    unit = "" if largest is None else f" ({largest:,} gathered at once)"
    lines = [
        f"Model states of zeropp in stage {stage}, bf16 and AdamW: {total:,} parameters{unit}, {machines}",
        f"{'per CPU':>14} | {'per GPU':>14} | settings",
    ]
    for names, settings in _combinations(stage):
        host, device = own.needs(settings, machines, factor)
        values = ", ".join(f"{name}={getattr(settings, name)}" for name in names)
        lines.append(f"{host / _GIB:>10.2f} GiB | {device / _GIB:>10.2f} GiB | {values}")
    # Printed and not logged: it is what the caller asked for, and notebooks show no log by default.
    print("\n".join(lines))


def _combinations(stage: int) -> Sequence[tuple[Sequence[str], _Settings]]:
    """Settings, with the names of those that the stage has; what is offloaded most comes first."""
    if stage == 2:
        return [(["cpu_offload"], _Settings(offload, False, False)) for offload in (True, False)]
    names = ["cpu_offload", "cpu_offload_params", "zero_init"]
    # The fourth combination, parameters alone, is the same as none.
    offloads = [(True, True), (True, False), (False, False)]
    return [(names, _Settings(*offload, zero_init)) for offload in offloads for zero_init in (True, False)]


def _check_count(name: str, value: float) -> int:
    """A number of elements, ranks or nodes."""
    # Notebooks say 2851e6, which is a float.
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        count = operator.index(whole)  # type: ignore[arg-type]
    except TypeError:
        kind = ValueError if isinstance(value, float) else TypeError
        raise kind(f"{name} is {value!r}; expected a whole number of at least 1") from None
    # True is an index, and surely a mistake.
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected a whole number of at least 1")
    if count < 1:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least 1")
    return count


def _check_counts(total_params: float, largest_layer_params: float) -> tuple[int, int]:
    total = _check_count("total_params", total_params)
    largest = _check_count("largest_layer_params", largest_layer_params)
    if largest > total:
        raise ValueError(f"largest_layer_params is {largest:,}; expected at most total_params, which is {total:,}")
    return total, largest


def _check_machines(num_gpus_per_node: int, num_nodes: int) -> _Nodes:
    return _Nodes(_check_count("num_gpus_per_node", num_gpus_per_node), _check_count("num_nodes", num_nodes))


def _check_factor(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"additional_buffer_factor is {value!r}; expected a number of at least 1")
    if not 1 <= value < math.inf:
        raise ValueError(f"additional_buffer_factor is {value!r}; expected a number of at least 1")
    return value


def _check_flag(name: str, value: bool) -> bool:
    # "False" of a command line would count as true.
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected True or False")
    return value


def _check_model(model: nn.Module) -> int:
    """How many elements are partitioned."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module, on any device, meta too")
    # Tied ones once, as they are trained; integers are in no unit.
    total = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    if total == 0:
        raise ValueError(
            f"model is a {type(model).__name__} without floating-point parameters; expected one that has some to "
            "partition"
        )
    return total
