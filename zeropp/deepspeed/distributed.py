"""Joining the process group that a launcher describes: torchrun, SLURM or MPI."""

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

# What other launchers call RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
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
    """Make the default process group, unless there is one, or this process is alone.

    The names are those of ``deepspeed.init_distributed``. A process that no launcher started needs no group, and gets
    none: a world of one.

    Args:
        dist_backend: of torch; None for gloo on CPUs and NCCL beside it on GPUs.
        auto_mpi_discovery: take ranks from Open MPI, MPICH or SLURM where torchrun's variables are missing.
        distributed_port: of the first rank, where the launcher names none.
        verbose: without effect.
        timeout: of the group; None for torch's default.
        init_method: of torch; None for ``env://``.
        dist_init_required: False to insist that there is a group already.
        config: without effect.
        rank: of this process, where the environment does not say so.
        world_size: likewise.

    Raises:
        RuntimeError: there is no group, and none is to be made; or a launcher says too little.
    """
    if dist.is_initialized():
        # Whoever made it knows better; asked twice, as scripts and trainers do, it is the same one.
        return
    if dist_init_required is False:
        raise RuntimeError(
            "dist_init_required is False, and torch.distributed has no process group; call init_process_group() before"
        )
    if auto_mpi_discovery and "RANK" not in os.environ:
        os.environ.update(_discovered(os.environ, distributed_port))
    if init_method is None and rank < 0 and "RANK" not in os.environ:
        return  # alone
    # torchrun names a port; under MPI and SLURM nobody does.
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        # What is agreed on between ranks goes by the CPU.
        backend = "cpu:gloo,cuda:nccl"
    # Before the group: NCCL makes its first communicator on the device that is current.
    if torch.cuda.is_available() and (local := os.environ.get("LOCAL_RANK")) is not None:
        torch.cuda.set_device(int(local))
    # gloo connects each rank with every other one.
    allow_files(max(world_size, int(os.environ.get("WORLD_SIZE") or 0)))
    dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)


def require_no_model_parallelism(mpu: Any) -> None:
    """Raise if ranks share a model.

    Args:
        mpu: an object such as Megatron's, or None.

    Raises:
        ValueError: it has more than one model-parallel rank.
    """
    # The two names under which Megatron's objects have it.
    for name in ("get_model_parallel_world_size", "get_tensor_model_parallel_world_size"):
        ask = getattr(mpu, name, None)
        if ask is not None and (size := ask()) > 1:
            raise ValueError(
                f"mpu has a model-parallel size of {size}, and zeropp has no tensor or pipeline parallelism; give it a "
                "model that is whole on each rank"
            )


def _discovered(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """torchrun's variables from another launcher's; none if there is none.

    Raises:
        RuntimeError: the launcher does not say where the first rank is.
    """
    for launcher, (rank, size, local, local_size) in _LAUNCHERS.items():
        # One process under SLURM is somebody's shell, and no job of ranks.
        if rank not in environment or int(environment.get(size, "1")) < 2:
            continue
        found = {"RANK": environment[rank], "WORLD_SIZE": environment[size]}
        if local in environment:
            found["LOCAL_RANK"] = environment[local]
        # SLURM may write "8(x2),4" for nodes that differ; then hosts tell.
        if environment.get(local_size, "").isdigit():
            found["LOCAL_WORLD_SIZE"] = environment[local_size]
        if "MASTER_ADDR" not in environment:
            found["MASTER_ADDR"] = _first_host(launcher, environment)
        found["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
        return found
    return {}


def _first_host(launcher: str, environment: Mapping[str, str]) -> str:
    # Written as "node[01-04]"; SLURM's own program spells it out.
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
