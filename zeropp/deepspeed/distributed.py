"""Creation of the default process group from the environment variables of a launcher: torchrun, SLURM or MPI."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zeropp.comm.process_groups import allow_files

__all__ = ["init_distributed", "require_no_model_parallelism"]

# Launcher -> its variables for torchrun's RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, in this order.
_LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}  # fmt: skip


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Create torch's default process group, unless it exists or no launcher started this process.

    The arguments are those of ``deepspeed.init_distributed``. A process without a launcher runs as a world of one rank
    and needs no process group.

    Args:
        dist_backend: torch backend; None for gloo without a GPU, and "cpu:gloo,cuda:nccl" with one.
        auto_mpi_discovery: if RANK is not set, read ranks from the variables of Open MPI, MPICH or SLURM.
        distributed_port: port of the first rank, used if MASTER_PORT is not set.
        verbose: no effect.
        timeout: timeout of the process group; None for torch's default.
        init_method: ``init_method`` of ``torch.distributed.init_process_group``; None for ``env://``.
        dist_init_required: False to raise instead of creating a group.
        config: no effect.
        rank: rank of this process, if the environment does not give it; -1 otherwise.
        world_size: number of ranks, if the environment does not give it; -1 otherwise.

    Raises:
        RuntimeError: no group exists and ``dist_init_required`` is False, or the launcher's variables do not name the
            first rank's host.
    """
    if dist.is_initialized():
        # Keep an existing group: a script and its trainer may both call this function.
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required is False, and torch.distributed has no process group; call init_process_group() before"
        )
    if auto_mpi_discovery and "RANK" not in os.environ:
        os.environ.update(_discovered(os.environ, distributed_port))
    if init_method is None and rank < 0 and "RANK" not in os.environ:
        return  # no launcher: a world of one rank
    # torchrun sets MASTER_PORT. MPI and SLURM do not.
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        # Ranks exchange small integers in CPU tensors, which NCCL cannot send.
        backend = "cpu:gloo,cuda:nccl"
    # Set the device before the group is created: NCCL creates its first communicator on the current device.
    if torch.cuda.is_available() and (local := os.environ.get("LOCAL_RANK")) is not None:
        torch.cuda.set_device(int(local))
    # gloo opens a socket to every other rank, so the limit on open files must allow that many.
    allow_files(max(world_size, int(os.environ.get("WORLD_SIZE") or 0)))
    dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)


def require_no_model_parallelism(mpu: Any) -> None:
    """Raise if tensor or model parallelism splits the model over several ranks.

    Args:
        mpu: Megatron-style object that describes the parallel groups; or None.

    Raises:
        ValueError: ``mpu`` reports a model-parallel size above 1.
    """
    # Megatron's objects report the model-parallel size under one of these two names.
    for name in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"):
        ask = getattr(mpu, name, None)
        if ask is not None and (size := ask()) > 1:
            raise ValueError(
                f"mpu has a model-parallel size of {size}, and zeropp has no tensor or pipeline parallelism; give it a "
                "model that is whole on each rank"
            )


def _discovered(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """Return torchrun's variables, translated from those of another launcher.

    Args:
        environment: environment variables of this process.
        port: port of the first rank, used if MASTER_PORT is not set.

    Returns:
        Values of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if known, LOCAL_RANK and LOCAL_WORLD_SIZE. Empty if
        no other launcher started at least 2 ranks.

    Raises:
        RuntimeError: the launcher's variables do not name the first rank's host.
    """
    for launcher, (rank, size, local, local_size) in _LAUNCHERS.items():
        # A SLURM job of one task is usually an interactive shell and no distributed job.
        if rank not in environment or int(environment.get(size, "1")) < 2:
            continue
        found = {"RANK": environment[rank], "WORLD_SIZE": environment[size]}
        if local in environment:
            found["LOCAL_RANK"] = environment[local]
        # SLURM writes "8(x2),4" if nodes have different numbers of tasks. LOCAL_WORLD_SIZE then stays unset, and zeropp
        # groups ranks by their host names.
        if environment.get(local_size, "").isdigit():
            found["LOCAL_WORLD_SIZE"] = environment[local_size]
        if "MASTER_ADDR" not in environment:
            found["MASTER_ADDR"] = _first_host(launcher, environment)
        found["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
        return found
    return {}


def _first_host(launcher: str, environment: Mapping[str, str]) -> str:
    """Return the name of the first rank's host from SLURM's list of nodes; raise if there is no such list."""
    # SLURM writes the list of nodes as "node[01-04]". scontrol expands it to host names.
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if nodes:
        names = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=60
        )
        return names.stdout.split()[0]
    raise RuntimeError(
        f"{launcher} started {environment.get('WORLD_SIZE', 'several')} ranks and does not say where the first one is; "
        "set MASTER_ADDR to the name of its host"
    )
