"""Network namespaces for benchmarks and tests: a network device inside one only carries traffic of its processes.

They need Linux and root; :func:`unavailable` returns the reason if they cannot be used.
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
_SECONDS = 30  # time limit of a command


def unavailable(*tools: str) -> str | None:
    """Return the reason why namespaces cannot be used here; None if they can.

    Args:
        tools: commands that are needed in addition to ``ip``.
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
    """Run a system command.

    Raises:
        RuntimeError: the command failed; the message contains its error output.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr.strip()}")


def ip(*words: str) -> None:
    """Run the command ``ip`` of iproute2; :func:`run` raises if it fails."""
    run("ip", *words)


def make(name: str, *settings: str) -> None:
    """Create a namespace and enable its loopback, with ``settings`` of ``ip link set``."""
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", *settings, "up")


def remove(name: str) -> None:
    """Kill all processes of a namespace and delete it; nothing happens if it does not exist."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=_SECONDS)
    for pid in listed.stdout.split():  # ranks of a launcher that was killed survive it in sessions of their own
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_SECONDS)


def command_on(name: str, *words: str) -> list[str]:
    """Return the command line that runs ``words`` in a namespace."""
    return ["ip", "netns", "exec", name, *words]


def choose_congestion(name: str, tcp: str | None) -> None:
    """Set TCP's congestion control in a namespace; None for the choice of :mod:`bench.common.congestion`."""
    run(*command_on(name, sys.executable, congestion.__file__, *([tcp] if tcp else [])))


# Functions that run inside a namespace.


def enter_new() -> None:
    """Move this process to a new namespace, enable its loopback, and choose TCP's congestion control there.

    Raises:
        OSError: the system is not Linux, or the process is not root's.
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
    """Return the bytes that a device of this process's namespace has sent, headers included."""
    # /proc/self/net shows the process's current namespace; /sys/class/net shows the namespace in which it was mounted.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])  # eight receive columns, then bytes sent
    raise RuntimeError(f"no device {device!r} in this process's network namespace")
