"""A network namespace for one job, so that the loopback counter counts that job alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import congestion

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1  # <linux/sockios.h>, <linux/if.h>


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def enter() -> None:
    """Move this process to a new network namespace, bring its loopback up and choose TCP's congestion control there.

    Needs root on Linux.
    """
    import fcntl

    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no new network namespace")
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as control:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))  # struct ifreq: name, flags
        fcntl.ioctl(control, _SIOCGIFFLAGS, request)
        name, flags = struct.unpack_from("16sh", request)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", name, flags | _IFF_UP))
    congestion.settle()


def private_network() -> tuple[Callable[[], None] | None, str]:
    """(what a child process must call first, "") or (None, why bytes cannot be counted)."""
    if sys.platform != "linux":
        return None, "not counted: needs Linux network namespaces"
    child = os.fork()  # tried in a child: this process must keep its own network
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            enter()
            code = 0
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        return None, "not counted: a private network namespace needs root"
    return enter, ""


def loopback_bytes() -> int:
    """Bytes sent over the loopback of this process's namespace, TCP/IP headers included."""
    # /proc/self/net follows the namespace of the process; /sys/class/net keeps the one it was mounted in.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])  # eight receive columns, then bytes sent
    raise RuntimeError("no loopback interface in /proc/self/net/dev")
