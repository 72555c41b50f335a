"""Commands and environments for the ranks of a job, and a private network that only counts their bytes."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from bench.common.flags import given_flags
from bench.common.namespaces import enter_new

__all__ = ["free_port", "private_network", "rank_command", "torchrun"]


def rank_command(args: argparse.Namespace, result: Path, wire: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a job's ranks, and its environment. Rank 0 writes ``result``.

    Args:
        args: parsed arguments of ``bench.step_time``.
        result: path of the result file.
        wire: "private" if only this job uses the loopback, else the reason why bytes cannot be counted.
    """
    flags = {
        "device": args.device, "dtype": args.dtype, "reduce-dtype": args.reduce_dtype, "steps": args.steps,
        "ranks": args.ranks, "systems": ",".join(args.systems), "rounds": args.rounds, "discard": args.discard,
        "result": result, **given_flags(args),
    }  # fmt: skip
    words = ["bench.step_time", *(f"--{name}={value}" for name, value in flags.items())]
    switches = ("staged", "alone", "compiled", "release_root")
    words += [f"--{name.replace('_', '-')}" for name in switches if getattr(args, name)]
    command, environment = torchrun(args.ranks, words)
    return command, {**environment, "STEP_TIME_WIRE": wire}


def torchrun(ranks: int, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts ranks of a module on this host, and its environment.

    Args:
        ranks: number of ranks; one rank is started without a launcher.
        words: the module and its arguments.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **address}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable]
    if ranks == 1:
        environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    else:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += ["--master-addr", address["MASTER_ADDR"], "--master-port", address["MASTER_PORT"]]
    return [*command, "-m", *words], environment


def free_port() -> int:
    """Return a TCP port that was free at the time of the call."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def private_network() -> tuple[Callable[[], None] | None, str]:
    """Return (function that a child process must call first, ""), or (None, reason why bytes cannot be counted)."""
    if sys.platform != "linux":
        return None, "not counted: needs Linux network namespaces"
    child = os.fork()  # try it in a child process, because this process must keep its network
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            enter_new()
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        return None, "not counted: a private network namespace needs root"
    return enter_new, ""
