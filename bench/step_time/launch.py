"""Commands and environments of a job's ranks, and a network whose loopback counts their bytes alone."""

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
    """The command that starts a job's ranks, and its environment; rank 0 writes ``result``.

    Args:
        args: of ``bench.step_time``.
        result: a file.
        wire: "private" if the loopback is this job's alone, else why bytes cannot be counted.
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
    """The command that starts so many ranks of a module on this host, and its environment.

    Args:
        ranks: 1 is started without a launcher.
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
    """A TCP port that was free a moment ago."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def private_network() -> tuple[Callable[[], None] | None, str]:
    """(what a child process must call first, "") or (None, why bytes cannot be counted)."""
    if sys.platform != "linux":
        return None, "not counted: needs Linux network namespaces"
    child = os.fork()  # tried in a child: this process must keep its own network
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
