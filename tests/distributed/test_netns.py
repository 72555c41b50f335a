"""The private network counts what ranks send, and cleans up after itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.netns import private_network

SCRIPT = Path(__file__).with_name("gather_bytes.py")
pytestmark = pytest.mark.root


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_counts_the_bytes_of_a_gather() -> None:
    shard_nbytes = 16 << 20
    seen = []
    for _ in range(3):  # a late receiver makes TCP send segments again: the least counts
        with private_network() as network:
            assert network.counters().sent_bytes == 0
            network.torchrun(SCRIPT, str(shard_nbytes), ranks=2)
            seen.append(network.counters().sent_bytes)
        if seen[-1] <= 2 * shard_nbytes * 1.02:
            break
    assert 2 * shard_nbytes <= min(seen) <= 2 * shard_nbytes * 1.02, seen


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
