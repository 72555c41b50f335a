"""Network namespaces, for benchmarks and tests: a device in one carries what was started there, and nothing else.

Linux and root only; where there is no root, :func:`unavailable` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

from bench.common import congestion

__all__ = ["choose_congestion", "command_on", "enter_new", "ip", "make", "remove", "run", "sent_bytes", "unavailable"]

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1  # <linux/sockios.h>, <linux/if.h>
_SECONDS = 30  # that a command may take


def unavailable(*tools: str) -> str | None:
    """Why there can be no namespaces here; None if there can.

    Args:
        tools: commands that are needed besides ``ip``.
    """
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root: run this with sudo"
    missing = [tool for tool in ("ip", *tools) if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    return None


def run(*words: str) -> None:
    """Run a command of the system's.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr.strip()}")


def ip(*words: str) -> None:
    """``ip``, from iproute2; see :func:`run`."""
    run("ip", *words)


def make(name: str, *settings: str) -> None:
    """A namespace whose loopback is up, with ``settings`` of ``ip link set``."""
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", *settings, "up")


def remove(name: str) -> None:
    """The namespace with all that still runs in it; it may not be there."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=_SECONDS)
    for pid in listed.stdout.split():  # ranks of a launcher that was killed have sessions of their own
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_SECONDS)


def command_on(name: str, *words: str) -> list[str]:
    """The command line that runs ``words`` in a namespace."""
    return ["ip", "netns", "exec", name, *words]


def choose_congestion(name: str, tcp: str | None) -> None:
    """Have TCP use ``tcp`` in a namespace; None for what :mod:`bench.common.congestion` chooses."""
    run(*command_on(name, sys.executable, congestion.__file__, *([tcp] if tcp else [])))


# Inside.


def enter_new() -> None:
    """Move this process to a new namespace, bring its loopback up and choose TCP's congestion control there.

    Raises:
        OSError: not on Linux, or not root.
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


def sent_bytes(device: str) -> int:
    """Bytes that a device of this process's namespace has sent, headers included."""
    # /proc/self/net follows the namespace of the process; /sys/class/net keeps the one it was mounted in.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])  # eight receive columns, then bytes sent
    raise RuntimeError(f"no device {device!r} in this process's network namespace")
