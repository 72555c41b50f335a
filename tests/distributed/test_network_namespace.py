"""The private network of tests counts the bytes that ranks send, and leaves no process or namespace behind."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bench.common import congestion
from tests.support.network_namespace import ROOT, UNDER, beside, private_network

SCRIPT = ROOT / "tests" / "support" / "gather_bytes_job.py"
pytestmark = pytest.mark.root


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.campaign
@pytest.mark.parametrize(("tcp", "busy"), UNDER)
def test_counts_the_bytes_of_a_gather(tcp: str | None, busy: bool) -> None:
    shard_nbytes = 16 << 20
    with private_network(tcp) as network, beside(busy):
        assert network.counters().sent_bytes == 0
        network.torchrun(SCRIPT, str(shard_nbytes), ranks=2)
        found = network.counters()
    assert 2 * shard_nbytes <= found.most_payload_bytes, found
    assert found.payload_bytes <= 1.002 * 2 * shard_nbytes, found


def test_the_congestion_control_is_the_one_that_is_chosen_or_asked_for() -> None:
    for name in [None, *congestion.allowed()]:
        with private_network(name) as network:
            found = network.run(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]).stdout.strip()
        assert found == name or (name is None and found == congestion.choice(congestion.allowed(), found))


def test_a_congestion_control_that_the_kernel_refuses_is_named() -> None:
    with pytest.raises(RuntimeError, match="instead of nonesuch; allowed: "), private_network("nonesuch"):
        pass


def test_failure_shows_the_output_and_leaves_nothing() -> None:
    with pytest.raises(RuntimeError, match="told to"), private_network() as network:
        network.run([sys.executable, "-c", "raise SystemExit('told to')"])
    assert network.name not in namespaces()


def test_timeout_ends_the_processes() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="longer than 1 s"), private_network() as network:
        network.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=1)
    assert time.monotonic() - start < 20
    assert network.name not in namespaces()


def test_unknown_device() -> None:
    with private_network() as network, pytest.raises(ValueError, match="no device 'eth7'"):
        network.counters("eth7")
