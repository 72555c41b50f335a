"""The example scripts as users start them: with torchrun on two ranks, on one rank, and stopped by Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path

import pytest
import train_fsdp2
from job import start_job

from tests.support.example_runs import DATA, SMALL, own_signals, records, trains
from tests.support.rank_pool import run_ranks
from zeropp.checkpoint import Series

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "train_gpt.py"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def command(ranks: int, metrics: Path, *flags: str) -> list[str]:
    """Return the command of the example, which trains on the example's own sources.

    Args:
        ranks: number of ranks; one rank runs without torchrun.
        metrics: file for the metrics.
        flags: further flags.
    """
    launcher: Sequence[str] = ()
    if ranks > 1:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}")
        launcher = (*launcher, "--master-addr=127.0.0.1", f"--master-port={port}")
    return [
        sys.executable,
        *launcher,
        str(SCRIPT),
        f"--metrics={metrics}",
        "--data",
        str(DATA),
        *SMALL,
        *flags,
    ]


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")])
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


@contextmanager
def started(arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own session, and end it at the end of the context."""
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun forwards the signal to its ranks, which have their own sessions
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def run(arguments: list[str], folder: Path, timeout: float = 100) -> str:
    with started(arguments, folder) as process:
        output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


def running_with(argument: Path) -> list[int]:
    """Return the ids of processes whose command line contains this path."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(argument).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue  # the process has ended in the meantime
    return found


def printed(metrics: Path, flags: list[str]) -> str:
    """Return the output of the example on this rank."""
    with redirect_stdout(io.StringIO()) as text:
        assert trains(metrics, flags) == 0
    return text.getvalue()


def test_two_ranks_train_like_one_without_zeropp(tmp_path: Path) -> None:
    two, plain = tmp_path / "two.jsonl", tmp_path / "plain.jsonl"
    flags = ("--steps=20", "--validate-every=10")
    output = run_ranks(2, printed, two, [*flags, "--batch=4", "--sample=12", "--prompt=import "], init=False)[0]
    assert run_ranks(1, trains, plain, [*flags, "--batch=8", "--sample=0", "--plain"], init=False) == [0]

    begin = records(two, "start")
    assert begin[0]["world"] == 2 and begin[0]["config"]["zero_optimization"] == {"stage": 3}
    assert records(two, "end") == [{"event": "end", "finished": True}]
    steps = records(two, "train")
    assert [record["step"] for record in steps] == list(range(1, 21))
    losses = [record["loss"] for record in steps]
    assert losses[0] > 5 and losses[-1] < losses[0] - 1.5
    assert all(record["grad_norm"] > 0 and record["skipped_steps"] == 0 for record in steps)
    for record in steps:
        by_hop = record["sent_bytes_per_step_by_hop"]
        assert by_hop and 0.99 < sum(by_hop.values()) / record["sent_bytes_per_step"] <= 1
        assert record["exposed_s_per_step"] >= 0 == record["sent_between_nodes_per_step"]
    assert all(record["sent_bytes_per_step"] > 0 and record["tokens_per_s"] > 0 for record in steps)
    held_out = [record["loss"] for record in records(two, "validation")]
    assert len(held_out) == 2 and held_out[1] < held_out[0] < 5.5
    assert "import " in output, "the sample starts with the prompt"

    assert losses == pytest.approx([record["loss"] for record in records(plain, "train")], abs=2e-3)
    assert held_out == pytest.approx([record["loss"] for record in records(plain, "validation")], abs=2e-3)


TEN_LINES = """
class Model(torch.nn.Sequential):
    def forward(self, batch):
        return super().forward(batch).square().mean()

layers = [torch.nn.Linear(width, width) for _ in range(4)]
"""


@pytest.mark.campaign
@pytest.mark.parametrize(("width", "times"), [(400, 1), (16, 5), (400, 5)])
def test_ten_lines_end_well(width: int, times: int, tmp_path: Path) -> None:
    """The first block of docs/using.md exits without errors, even if it closes nothing and gathers are in flight."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "using.md").read_text(), re.DOTALL)
    assert block is not None
    usage = block.group(1).replace("model = Model()", "model = Model(*layers)")
    setting = TEN_LINES.replace("width", str(width))
    loader = f"loader = [torch.randn(4, {width}) for _ in range(3)]\n"
    script = tmp_path / "ten_lines.py"
    script.write_text(f"import torch{setting}{loader}{usage}print('trained', flush=True)\n")
    launch = command(2, tmp_path / "unused")[1:5]
    for _ in range(times):
        output = run([sys.executable, *launch, str(script)], tmp_path)
        assert output.count("trained") == 2


FSDP2_SCRIPT = ROOT / "examples" / "train_fsdp2.py"


FSDP2_FLAGS = ["--layers=2", "--d-model=32", "--heads=2", "--seq-len=16", "--steps=8", "--log-every=1"]


def losses_in(output: str) -> list[float]:
    """Return the losses in the output of the FSDP2 example."""
    return [float(each) for each in re.findall(r"^step \d+: loss ([0-9.]+)$", output, re.MULTILINE)]


def usual_fsdp2() -> str:
    """Return the output of the FSDP2 example without quantization."""
    with redirect_stdout(io.StringIO()) as printed, own_signals():
        assert train_fsdp2.main([*FSDP2_FLAGS, f"--data={DATA}", "--plain"]) == 0
    return printed.getvalue()


@pytest.mark.campaign
def test_the_fsdp2_example(tmp_path: Path) -> None:
    """With quantization the losses agree with FSDP2's to 2 %, and the output lists the bytes sent."""
    plain_output, _ = run_ranks(2, usual_fsdp2, init=False)
    launch = [*command(2, tmp_path / "unused")[:5], str(FSDP2_SCRIPT), *FSDP2_FLAGS, f"--data={DATA}"]
    output = run([*launch, "--ranks-per-node=1", "--feedback=cross"], tmp_path)
    usual, losses = losses_in(plain_output), losses_in(output)
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.1
    assert losses == pytest.approx(usual, rel=0.02) and losses != usual
    rows = re.findall(r"^(\S+) +(gather|reduce) +(\S+) +cross +2 +(\S+) +\d+ +[\d,]+$", output, re.MULTILINE)
    ways = (("gather", "2->1", "int8"), ("reduce", "1->2", "feedback(int4+bf16)"))
    assert set(rows) == {(unit, *way) for unit in ("(root)", "blocks.0", "blocks.1") for way in ways}
    assert "bytes sent" not in plain_output


@pytest.mark.campaign
@pytest.mark.timeout(240)
def test_a_killed_run_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """A killed run resumes with fewer ranks from the newest checkpoint.

    A step keeps its windows of text, in more micro-batches. A batch size that does not divide the step is refused.
    """
    flags = ("--steps=12", "--save-every=2", "--sample=0", f"--checkpoint={tmp_path / 'run'}")
    whole, first, second = (tmp_path / f"{name}.jsonl" for name in ("whole", "first", "second"))
    assert run_ranks(2, trains, whole, ["--steps=12", "--sample=0", "--batch=4"], init=False) == [0, 0]
    with started(command(2, first, *flags, "--batch=4"), tmp_path) as process:
        # Wait for the name in ``latest``, not for the files: before that, a resumed run would use the older checkpoint.
        run, until = tmp_path / "run", time.monotonic() + 60
        while not ((run / "latest").exists() and (Series(run).latest() or 0) >= 4) and time.monotonic() < until:
            time.sleep(0.01)
        for rank in running_with(first):
            os.kill(rank, signal.SIGKILL)
        process.communicate(timeout=60)
    assert run_ranks(1, trains, second, [*flags, "--batch=4", "--resume"], init=False) == [0]
    expected = {record["step"]: record["loss"] for record in records(whole, "train")}
    found = {record["step"]: record["loss"] for record in records(second, "train")}
    assert max(found) == 12 and 4 < min(found) <= 12
    assert found == pytest.approx({step: expected[step] for step in found}, abs=2e-3)
    (refused,) = run_ranks(1, trains, second, [*flags, "--batch=3", "--resume"], init=False, catch=True)
    assert "has 8 windows a step, which 1 ranks with --batch 3 do not make" in refused.message


def test_the_last_step_is_saved_and_runs_are_not_mixed(tmp_path: Path) -> None:
    run, metrics = tmp_path / "run", tmp_path / "metrics.jsonl"
    flags = ["--steps=3", "--save-every=2", "--sample=0", "--batch=2", f"--checkpoint={run}"]
    assert run_ranks(1, trains, metrics, flags, init=False) == [0]
    assert sorted(each.name for each in run.glob("step-*")) == ["step-00000002", "step-00000003"]
    before = (run / "run.json").read_text(), metrics.read_text()
    for refused in run_ranks(2, trains, metrics, [*flags, "--batch=4"], init=False, catch=True):
        assert "has a run, which would be mixed with this one; give --resume" in refused.message
    assert ((run / "run.json").read_text(), metrics.read_text()) == before


def waits_in_vain() -> tuple[int, float]:
    """Let rank 1 wait for rank 0, which does not come.

    Returns:
        The value received from rank 0, and seconds until the wait ends.
    """
    with own_signals(), start_job(plain=False, patience=1) as job:
        first, start = job.first(7 + job.rank), time.monotonic()
        if job.rank == 0:
            time.sleep(3)
        else:
            with pytest.raises(RuntimeError):
                job.agree()
        return first, time.monotonic() - start


@pytest.mark.campaign
def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_the_configuration_says() -> None:
    (said, _), (heard, seconds) = run_ranks(2, waits_in_vain, init=False)
    assert said == heard == 7 and seconds < 2.8


def test_accumulation_and_a_config_file(tmp_path: Path) -> None:
    config = tmp_path / "zero.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 1.0}))
    metrics, plain = tmp_path / "metrics.jsonl", tmp_path / "plain.jsonl"
    flags = ("--steps=6", "--batch=4", "--accumulate=2", "--sample=0")
    assert run_ranks(1, trains, metrics, [*flags, f"--config={config}"], init=False) == [0]
    assert run_ranks(1, trains, plain, [*flags, "--plain"], init=False) == [0]
    losses, expected = ([record["loss"] for record in records(path, "train")] for path in (metrics, plain))
    assert losses == pytest.approx(expected, abs=1e-3)


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="looks for left-over ranks in /proc")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_leaves_cleanly(ranks: int, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with started(command(ranks, metrics, "--steps=1000000", "--batch=2"), tmp_path) as process:
        deadline = time.monotonic() + 80
        while len(records(metrics, "train")) < 3:
            assert process.poll() is None and time.monotonic() < deadline, "no training step was seen"
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=25)
    # torchrun has its own exit code after a signal.
    assert process.returncode == 130 if ranks == 1 else process.returncode != 0, output
    assert "stopped on request" in output
    stopped, last = records(metrics, "interrupted"), records(metrics, "train")[-1]
    assert len(stopped) == 1 and stopped[0]["step"] == last["step"]
    assert records(metrics, "end") == [{"event": "end", "finished": False}]
    assert running_with(metrics) == []
