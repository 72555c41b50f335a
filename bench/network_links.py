"""Nodes on one machine: network namespaces joined by links of a chosen rate. Linux and root only.

Each node is a namespace with one device that leads to a bridge in a namespace of its own. What the ranks of a node say
to each other stays on its loopback; what leaves the node passes the device, whose counter the kernel keeps, and a token
bucket that lets so many bits a second through.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import congestion

__all__ = ["DEVICE", "Node", "cut_into_frames", "nodes", "sent_bytes", "set_rate", "unavailable"]

DEVICE = "uplink"
_MTU = "9000"  # bytes a frame, as on the networks of clusters; headers are 0.7 % of that
_SEGMENT = 60 * 1024  # bytes that TCP hands the device at once, at most; network cards cut them into frames themselves
# Bytes that may pass at once: one segment, or the kernel would cut it here, on the cores that the ranks compute on.
_BURST = 64 * 1024
_UNCUT = 2**16 - 1  # frames, more than a segment has
_QUEUE = 64 * 2**20  # bytes that may wait: frames that are dropped would be sent, and counted, twice


@dataclass(frozen=True)
class Node:
    """A namespace and its address on the common network."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs ``words`` on this node."""
        return ["ip", "netns", "exec", self.name, *words]


def unavailable() -> str | None:
    """Why there can be no nodes here; None if there can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces and rate limits need root: run this with sudo"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found; install iproute2"
    return None


@contextlib.contextmanager
def nodes(count: int, tcp: str | None = None) -> Iterator[list[Node]]:
    """``count`` nodes that reach each other at full speed, until :func:`set_rate`; gone at the end, whatever ends it.

    Args:
        count: how many.
        tcp: the congestion control that TCP is to use there; None for what ``congestion`` chooses.

    Raises:
        RuntimeError: they cannot be made.
    """
    reason = unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    prefix = f"zeropp-{os.getpid()}"
    hub = f"{prefix}-hub"
    found = [Node(f"{prefix}-{index}", f"10.213.7.{index + 1}") for index in range(count)]
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        _make(hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        for index, node in enumerate(found):
            _make(node.name)
            port = f"port{index}"
            _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", node.name)
            _run("ip", "-n", hub, "link", "set", port, "master", "bridge", "mtu", _MTU, "up")
            _run("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", DEVICE)
            _run("ip", "-n", node.name, "link", "set", DEVICE, "mtu", _MTU, "gso_max_size", str(_SEGMENT), "up")
            _run(*node.command(sys.executable, congestion.__file__, *([tcp] if tcp else [])))
        yield found
    finally:
        for number in before:  # whoever is impatient, and `timeout`, sends several
            signal.signal(number, signal.SIG_IGN)
        for name in [node.name for node in found] + [hub]:
            _remove(name)
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    """A signal that would end the process becomes an exception, so that nodes are removed."""
    raise SystemExit(128 + number)


def _make(name: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _remove(name: str) -> None:
    """The namespace with all that still runs in it; it may not be there."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr.strip()}")


# On a node.


def set_rate(megabits: float | None) -> None:
    """Let this node send so many million bits a second, headers included; None for no limit."""
    subprocess.run(["tc", "qdisc", "delete", "dev", DEVICE, "root"], capture_output=True)  # there may be none
    if megabits is not None:
        rate = f"{round(megabits * 1000)}kbit"
        bucket = ["tbf", "rate", rate, "burst", str(_BURST), "limit", str(_QUEUE)]
        _run("tc", "qdisc", "add", "dev", DEVICE, "root", *bucket)


def cut_into_frames(yes: bool) -> None:
    """Have the kernel cut what TCP sends into frames, each with its headers, before the device counts it; or not."""
    _run("ip", "link", "set", "dev", DEVICE, "gso_max_segs", "1" if yes else str(_UNCUT))


def sent_bytes() -> int:
    """Bytes that have left this node; headers of TCP, IP and Ethernet as often as :func:`cut_into_frames` says."""
    # /proc/self/net follows the namespace of the process; /sys/class/net keeps the one it was mounted in.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            return int(counters.split()[8])  # eight receive columns, then bytes sent
    raise RuntimeError(f"no device {DEVICE!r} here: this runs on the nodes of bench/network.py")
