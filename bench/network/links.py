"""Nodes on one machine: network namespaces joined by links of a chosen rate. Linux and root only.

Each node is a namespace with one device that leads to a bridge in a namespace of its own. What the ranks of a node say
to each other stays on its loopback; what leaves the node passes the device, whose counter the kernel keeps, and a token
bucket that lets so many bits a second through.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from bench.common import namespaces
from bench.common.namespaces import ip, run

__all__ = ["DEVICE", "Node", "cut_into_frames", "nodes", "sent_bytes", "set_rate"]

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
        return namespaces.command_on(self.name, *words)


@contextlib.contextmanager
def nodes(count: int, tcp: str | None = None) -> Iterator[list[Node]]:
    """``count`` nodes that reach each other at full speed, until :func:`set_rate`; gone at the end, whatever ends it.

    Args:
        count: how many.
        tcp: the congestion control that TCP is to use there; None for what ``congestion`` chooses.

    Raises:
        RuntimeError: they cannot be made.
    """
    reason = namespaces.unavailable("tc")
    if reason is not None:
        raise RuntimeError(reason)
    prefix = f"zeropp-{os.getpid()}"
    hub = f"{prefix}-hub"
    found = [Node(f"{prefix}-{index}", f"10.213.7.{index + 1}") for index in range(count)]
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        namespaces.make(hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for index, node in enumerate(found):
            namespaces.make(node.name)
            port = f"port{index}"
            ip("-n", hub, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", node.name)
            ip("-n", hub, "link", "set", port, "master", "bridge", "mtu", _MTU, "up")
            ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", DEVICE)
            ip("-n", node.name, "link", "set", DEVICE, "mtu", _MTU, "gso_max_size", str(_SEGMENT), "up")
            namespaces.choose_congestion(node.name, tcp)
        yield found
    finally:
        for number in before:  # whoever is impatient, and `timeout`, sends several
            signal.signal(number, signal.SIG_IGN)
        for name in [node.name for node in found] + [hub]:
            namespaces.remove(name)
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    """A signal that would end the process becomes an exception, so that nodes are removed."""
    raise SystemExit(128 + number)


# On a node.


def set_rate(megabits: float | None) -> None:
    """Let this node send so many million bits a second, headers included; None for no limit."""
    subprocess.run(["tc", "qdisc", "delete", "dev", DEVICE, "root"], capture_output=True)  # there may be none
    if megabits is not None:
        rate = f"{round(megabits * 1000)}kbit"
        bucket = ["tbf", "rate", rate, "burst", str(_BURST), "limit", str(_QUEUE)]
        run("tc", "qdisc", "add", "dev", DEVICE, "root", *bucket)


def cut_into_frames(yes: bool) -> None:
    """Have the kernel cut what TCP sends into frames, each with its headers, before the device counts it; or not."""
    ip("link", "set", "dev", DEVICE, "gso_max_segs", "1" if yes else str(_UNCUT))


def sent_bytes() -> int:
    """Bytes that have left this node; headers of TCP, IP and Ethernet as often as :func:`cut_into_frames` says."""
    return namespaces.sent_bytes(DEVICE)
