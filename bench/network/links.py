"""Nodes on one machine: network namespaces connected by links of a limited rate. Needs Linux and root.

Each node is a namespace with one network device, which leads to a bridge in another namespace. Ranks of one node
communicate over the namespace's loopback. All other traffic goes through the device, where the kernel counts its bytes
and a token bucket limits its rate.
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
_MTU = "9000"  # bytes per frame, as in cluster networks; headers are 0.7 % of a frame
_SEGMENT = 60 * 1024  # largest number of bytes that TCP passes to the device at once; real network cards split them
# Bytes that may pass at once: at least one segment. With less, the kernel would split segments, on the ranks' cores.
_BURST = 64 * 1024
_UNCUT = 2**16 - 1  # limit of frames per segment that no segment reaches
_QUEUE = 64 * 2**20  # bytes that may wait; with a shorter queue frames would be dropped, sent again and counted twice


@dataclass(frozen=True)
class Node:
    """A namespace, and its IP address on the network between nodes."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """Return the command line that runs ``words`` on this node."""
        return namespaces.command_on(self.name, *words)


@contextlib.contextmanager
def nodes(count: int, tcp: str | None = None) -> Iterator[list[Node]]:
    """Context with ``count`` connected nodes without a rate limit (see :func:`set_rate`); removes them at the end.

    Args:
        count: number of nodes.
        tcp: TCP congestion control for the nodes; None for the choice of :mod:`bench.common.congestion`.

    Raises:
        RuntimeError: the nodes cannot be made.
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
        for number in before:  # ignore further signals, which a user or `timeout` may send during the cleanup
            signal.signal(number, signal.SIG_IGN)
        for name in [node.name for node in found] + [hub]:
            namespaces.remove(name)
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    """Turn a signal into an exception, so that the nodes are removed before the process ends."""
    raise SystemExit(128 + number)


# Functions that run on a node.


def set_rate(megabits: float | None) -> None:
    """Limit the rate at which this node sends, in million bits per second with headers; None for no limit."""
    subprocess.run(["tc", "qdisc", "delete", "dev", DEVICE, "root"], capture_output=True)  # fails if there is no limit
    if megabits is not None:
        rate = f"{round(megabits * 1000)}kbit"
        bucket = ["tbf", "rate", rate, "burst", str(_BURST), "limit", str(_QUEUE)]
        run("tc", "qdisc", "add", "dev", DEVICE, "root", *bucket)


def cut_into_frames(yes: bool) -> None:
    """Let the kernel split TCP segments into frames before the device counts their bytes, so all headers count."""
    ip("link", "set", "dev", DEVICE, "gso_max_segs", "1" if yes else str(_UNCUT))


def sent_bytes() -> int:
    """Return the bytes that have left this node. :func:`cut_into_frames` decides how many headers are included."""
    return namespaces.sent_bytes(DEVICE)
