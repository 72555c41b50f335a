"""A private network namespace for ranks, and the exact number of bytes that they send in it.

    with private_network() as network:
        network.torchrun("script.py", ranks=2)
        print(network.counters().sent_bytes)

A new namespace has its own loopback device with counters at zero. Only the ranks started in the namespace use this
device, so its counters are their traffic. Loopback counts each frame once as sent and once as received. So `sent_bytes`
is the sum over all ranks, with TCP headers and retransmissions. `payload_bytes` excludes both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.common import congestion, namespaces

__all__ = ["UNDER", "Counters", "Network", "beside", "private_network"]

ROOT = Path(__file__).resolve().parents[2]
_numbers = itertools.count()
_FRAME = 9000  # bytes. Retransmitted segments are counted as full frames; at the usual 65536, few are full.
_HEADERS = 52  # bytes of the IP header and the TCP header with time stamps; loopback counts no Ethernet header

# Test parameters: the TCP congestion control (None for the default choice), and True to keep a core busy. All but the
# first run only in the campaign.
_CHOSEN = [pytest.param(None, False, id="chosen")]
_IDLE = [pytest.param(name, False, id=name) for name in congestion.allowed()]
_BUSY = [pytest.param(name, True, id=f"{name}-busy", marks=pytest.mark.campaign) for name in congestion.allowed()]
UNDER = [*_CHOSEN, *(pytest.param(*p.values, id=p.id, marks=pytest.mark.campaign) for p in _IDLE), *_BUSY]


@dataclass(frozen=True)
class Counters:
    """Traffic counters of one device since its creation."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int
    resent_segments: int
    """TCP segments that were retransmitted, on all devices of the namespace."""

    @classmethod
    def parse(cls, devices: str, protocols: str, device: str = "lo") -> Counters:
        """Parse the texts of /proc/net/dev and /proc/net/snmp."""
        lines = {name.strip(): values.split() for name, _, values in (x.partition(":") for x in devices.splitlines())}
        if device not in lines:
            raise ValueError(f"no device {device!r} here; /proc/net/dev says:\n{devices}")
        names, values = (line.split() for line in protocols.splitlines() if line.startswith("Tcp:"))
        resent = int(values[names.index("RetransSegs")])
        return cls(*(int(lines[device][column]) for column in (0, 1, 8, 9)), resent)

    @property
    def payload_bytes(self) -> int:
        """Return the bytes without headers and retransmissions.

        A retransmitted segment is counted as a full frame, though it may be smaller.
        """
        return self.sent_bytes - _HEADERS * self.sent_packets - (_FRAME - _HEADERS) * self.resent_segments

    @property
    def most_payload_bytes(self) -> int:
        """Return the bytes without headers but with retransmissions, an upper bound of the payload."""
        return self.sent_bytes - _HEADERS * self.sent_packets

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.received_bytes - other.received_bytes,
            self.received_packets - other.received_packets,
            self.sent_bytes - other.sent_bytes,
            self.sent_packets - other.sent_packets,
            self.resent_segments - other.resent_segments,
        )


@dataclass(frozen=True)
class Network:
    """A network namespace whose only device is a loopback device."""

    name: str

    def run(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespace and return its output.

        Args:
            command: program and arguments.
            env: additional environment variables.
            timeout: limit in seconds.

        Raises:
            RuntimeError: the command failed or took too long; the message has both output streams.
        """
        full_env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **(env or {})}
        full_env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        process = subprocess.Popen(
            namespaces.command_on(self.name, *command),
            cwd=ROOT,
            env=full_env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            self._end(process)
            out, err = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"{command} took longer than {timeout:g} s\n{out}\n{err}") from None
            raise
        if process.returncode != 0:
            raise RuntimeError(f"{command} ended with status {process.returncode}\n{out}\n{err}")
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def torchrun(
        self,
        script: str | Path,
        *arguments: str,
        ranks: int,
        env: dict[str, str] | None = None,
        timeout: float = 100,
    ) -> subprocess.CompletedProcess[str]:
        """Run `torchrun --nnodes=1 --nproc-per-node=<ranks> script arguments...` in the namespace.

        The launcher's own traffic, some tens of kilobytes, is included in the counters.
        """
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
        where = ["--master-addr=127.0.0.1", "--master-port=29500"]  # the namespace has its own ports
        return self.run([*launcher, *where, str(script), *arguments], env=env, timeout=timeout)

    def counters(self, device: str = "lo") -> Counters:
        """Return the counters of a device now."""
        devices, protocols = (self.run(["cat", f"/proc/net/{name}"], timeout=30).stdout for name in ("dev", "snmp"))
        return Counters.parse(devices, protocols, device)

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def private_network(tcp: str | None = None) -> Iterator[Network]:
    """Create a namespace, and remove it with all its processes at the end.

    The test is skipped, with the reason, if no namespace can be created.

    Args:
        tcp: TCP congestion control in the namespace; None for the choice of ``bench.common.congestion``.
    """
    reason = namespaces.unavailable()
    if reason is not None:
        pytest.skip(reason)
    network = Network(f"zeropp-test-{os.getpid()}-{next(_numbers)}")
    try:
        namespaces.make(network.name, "mtu", str(_FRAME))
    except RuntimeError as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    try:
        namespaces.choose_congestion(network.name, tcp)
        yield network
    finally:
        namespaces.remove(network.name)


@contextlib.contextmanager
def beside(busy: bool) -> Iterator[None]:
    """Run the block with a core kept busy by another process if ``busy``. The process ends when this process ends."""
    if not busy:
        yield
        return
    endless = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    pass"
    process = subprocess.Popen([sys.executable, "-c", endless])
    try:
        yield
    finally:
        process.kill()
        process.wait()
