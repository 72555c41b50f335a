"""An elastic torchrun job continues on one host after the other host is killed, and on both when that host returns.

Hosts are network namespaces. All processes of the second host are killed while its rank is in a step or in a save. In
some cases its link is cut first, so that the other host receives no sign of the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.common import namespaces
from bench.network.links import DEVICE, Node, nodes
from tests.support.elastic_job import ALONE
from tests.support.example_runs import DATA, SMALL, records, trains
from tests.support.rank_pool import ROOT, run_ranks

pytestmark = pytest.mark.root

STEPS, EVERY = 14, 4
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "zeropp": {"hang_timeout": 12},
}
# torchrun's times in seconds: for signs of life of a host, and for further hosts once the minimum is reached.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"


class Host:
    """A node on which an agent of torchrun can be started and killed.

    Args:
        node: network namespace of the host.
        head: node that serves the rendezvous.
        arguments: arguments of the training program.
        folder: working directory and folder of the log.
    """

    def __init__(self, node: Node, head: Node, arguments: list[str], folder: Path) -> None:
        self.node, self.head, self.arguments, self.folder = node, head, arguments, folder
        self.log = folder / f"{node.address}.log"
        self.agent: subprocess.Popen[bytes] | None = None

    def start(self, **more: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE, **more}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
        launcher += ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job", f"--local-addr={self.node.address}"]
        launcher += [f"--rdzv-endpoint={self.head.address}:29500"]
        launcher += [f"--rdzv-conf=is_host={self.node is self.head},{RENDEZVOUS}"]
        with self.log.open("ab") as log:
            command = self.node.command(*launcher, "--module", "tests.support.elastic_job", *self.arguments)
            self.agent = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill all processes in the host's network namespace."""
        while pids := subprocess.run(
            ["ip", "netns", "pids", self.node.name], capture_output=True, text=True, check=True
        ).stdout.split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        assert self.agent is not None
        self.agent.wait()

    def link(self, state: str) -> None:
        namespaces.ip("-n", self.node.name, "link", "set", DEVICE, state)


@contextlib.contextmanager
def two_hosts(arguments: list[str], folder: Path) -> Iterator[list[Host]]:
    reason = namespaces.unavailable("tc")
    if reason is not None:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(nodes(2))
        except RuntimeError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        hosts = [Host(node, found[0], arguments, folder) for node in found]
        try:
            yield hosts
        except BaseException:
            for host in hosts:
                print(f"--- {host.node.address}", host.log.read_text() if host.log.exists() else "", sep="\n")
            raise


def until(what: Callable[[], object], why: str, seconds: float = 90.0) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit, f"{why} has not come about in {seconds:g} s"
        time.sleep(0.02)


@pytest.mark.campaign
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("hold", "told"),
    [
        pytest.param("step 7", True, marks=pytest.mark.campaign),
        pytest.param("save 8", True),
        pytest.param("step 7", False, marks=pytest.mark.campaign),
        pytest.param("save 8", False, marks=pytest.mark.campaign),
    ],
)
def test_one_of_two_hosts_goes_and_comes(hold: str, told: bool, tmp_path: Path) -> None:
    config, metrics, run = tmp_path / "zero.json", tmp_path / "metrics.jsonl", tmp_path / "run"
    config.write_text(json.dumps(CONFIG))
    flags = [f"--config={config}", f"--steps={STEPS}", "--sample=0"]
    saved = [f"--checkpoint={run}", f"--save-every={EVERY}", "--resume", f"--metrics={metrics}", f"--data={DATA}"]
    held = tmp_path / "held"

    def worlds() -> list[int]:
        return [record["world"] for record in records(metrics, "start")]

    with two_hosts([*SMALL, *flags, *saved], tmp_path) as (first, second):
        first.start()
        second.start(HOLD=hold, HELD=str(held))
        until(held.exists, f"the second host's {hold}")
        until((run / "step-00000004" / "metadata.json").exists, "the first checkpoint")
        before = len(worlds())
        assert worlds()[-1] == 2 and not (run / "step-00000008").exists()
        if not told:
            second.link("down")
        second.kill()
        until(lambda: len(worlds()) > before, "a job on one host")
        second.link("up")
        second.start()
        assert first.agent is not None and second.agent is not None
        assert first.agent.wait(120) == 0 and second.agent.wait(30) == 0
    check(records_of(metrics), before)
    expected = tmp_path / "expected.jsonl"
    assert run_ranks(2, trains, expected, flags, init=False) == [0, 0]
    losses = {record["step"]: record["loss"] for record in records(expected, "train")}
    for record in records(metrics, "train"):
        assert record["loss"] == pytest.approx(losses[record["step"]], abs=2e-3), record["step"]
    assert not [each.name for each in run.iterdir() if "saving" in each.name]


def records_of(metrics: Path) -> list[dict]:
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def check(found: list[dict], before: int) -> None:
    """Check which steps were trained on how many ranks, from the last start on two ranks before the kill.

    Args:
        found: metrics records of the run.
        before: number of starts before the host was killed.
    """
    parts: list[tuple[int, list[int]]] = []
    for record in found:
        if record["event"] == "start":
            parts.append((record["world"], []))
        elif record["event"] == "train":
            parts[-1][1].append(record["step"])
    (two, there), *rest = parts[before - 1 :]
    assert two == 2 and there[-1] >= 6
    last = EVERY + ALONE + 1
    assert rest == [(1, list(range(EVERY + 1, last + 1))), (2, list(range(last + 1, STEPS + 1)))]
    assert found[-1] == {"event": "end", "finished": True}
