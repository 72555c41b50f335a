"""A private network namespace: run ranks in it, and read exactly the bytes that they sent.

    with private_network() as network:
        network.torchrun("script.py", ranks=2)
        print(network.counters().sent_bytes)

The loopback device of a new namespace has carried nothing, and nobody else can use it, so its counters are the traffic
of what ran inside. A frame on loopback counts once as sent and once as received: `sent_bytes` is the sum over all
ranks, with TCP's headers and with what it sent again; `payload_bytes` is without both.
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
_FRAME = 9000  # bytes. Segments that TCP sends again are counted in frames; of the usual 65536, few are full.
_HEADERS = 52  # bytes of IP, TCP and its time stamps; loopback counts no Ethernet header

# Parameters of tests: TCP's congestion control, None for the one that is chosen, and whether a core is busy. All but
# the chosen one are for the campaign.
_CHOSEN = [pytest.param(None, False, id="chosen")]
_IDLE = [pytest.param(name, False, id=name) for name in congestion.allowed()]
_BUSY = [pytest.param(name, True, id=f"{name}-busy", marks=pytest.mark.campaign) for name in congestion.allowed()]
UNDER = [*_CHOSEN, *(pytest.param(*p.values, id=p.id, marks=pytest.mark.campaign) for p in _IDLE), *_BUSY]


@dataclass(frozen=True)
class Counters:
    """What one device has carried since it was made."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int
    resent_segments: int
    """TCP's, on all devices of the namespace."""

    @classmethod
    def parse(cls, devices: str, protocols: str, device: str = "lo") -> Counters:
        """From the texts of /proc/net/dev and /proc/net/snmp."""
        lines = {name.strip(): values.split() for name, _, values in (x.partition(":") for x in devices.splitlines())}
        if device not in lines:
            raise ValueError(f"no device {device!r} here; /proc/net/dev says:\n{devices}")
        names, values = (line.split() for line in protocols.splitlines() if line.startswith("Tcp:"))
        resent = int(values[names.index("RetransSegs")])
        return cls(*(int(lines[device][column]) for column in (0, 1, 8, 9)), resent)

    @property
    def payload_bytes(self) -> int:
        """Without headers, and without what TCP sent again: whole frames, though a segment may fill less of one."""
        return self.sent_bytes - _HEADERS * self.sent_packets - (_FRAME - _HEADERS) * self.resent_segments

    @property
    def most_payload_bytes(self) -> int:
        """The same, had every segment that was sent again been an empty one."""
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
    """A namespace with a loopback device that is up, and nothing else."""

    name: str

    def run(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside and return its output.

        Raises RuntimeError, with both streams, when it fails or takes too long.
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
        """`torchrun --standalone --nproc-per-node=<ranks> script arguments...` inside.

        The launcher's own traffic is in the counters: some tens of kilobytes.
        """
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
        where = ["--master-addr=127.0.0.1", "--master-port=29500"]  # nobody else has ports in here
        return self.run([*launcher, *where, str(script), *arguments], env=env, timeout=timeout)

    def counters(self, device: str = "lo") -> Counters:
        """The device's counters now."""
        devices, protocols = (self.run(["cat", f"/proc/net/{name}"], timeout=30).stdout for name in ("dev", "snmp"))
        return Counters.parse(devices, protocols, device)

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def private_network(tcp: str | None = None) -> Iterator[Network]:
    """Make a namespace, and remove it with all its processes at the end.

    Skips the test, with the reason, where none can be made.

    Args:
        tcp: the congestion control that TCP is to use; None for what ``congestion`` chooses.
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
    """With a process, if ``busy``, that keeps a core busy; it ends with this one, whatever ends that."""
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
