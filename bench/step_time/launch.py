"""Where a job's ranks meet, and whose bytes the loopback counts."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable

from bench.common.namespaces import enter_new

__all__ = ["free_port", "private_network"]


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
