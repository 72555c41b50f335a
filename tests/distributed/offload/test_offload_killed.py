"""Jobs with states in swap files that a signal ends: no file is left on the disk.

A new job resumes from the last checkpoint and gets the losses of an undisturbed job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STEPS = 8
PROGRAM = """
import json, signal, sys, time, torch, zeropp
from tests.support.small_models import MODELS
from tests.support.branching_models import make_config
from zeropp.offload import swap
# A shell that starts the tests in the background makes them ignore SIGINT. Restore the default handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
folder, slow = sys.argv[1], sys.argv[2] == "slow"
torch.manual_seed(3)
kind = MODELS["gpt"]
model = kind.build().float()
disk = {"device": "nvme", "nvme_path": folder + "/swap"}
config = make_config(
    gradient_clipping=0.3, aio={"block_size": 1024}, offload_param={**disk, "max_in_cpu": 0},
    offload_optimizer={**disk, "pipeline_read": True, "pipeline_write": True},
)
optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), model, config)
series = zeropp.checkpoint.Series(folder + "/saved")
step = series.latest() or 0
if step:
    series.load(model, optimizer)
def say(text):
    # One write call per line, because several threads print.
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()
write = swap.write_at
def written(*arguments):
    # In the step after the checkpoint, report each write, so that the signal comes while states are half written.
    count = write(*arguments)
    if slow and step == 4:
        say("writing")
        time.sleep(0.05)
    return count
swap.write_at = written
while step < 8:
    loss = kind.loss(model, kind.batch(torch.Generator().manual_seed(31 * step)))
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    say(json.dumps([step, loss.item()]))
    if step % 3 == 0:
        series.save(step, model, optimizer)
optimizer.close()
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), how]
    return subprocess.Popen(
        command, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def losses(text: str) -> dict[int, float]:
    return dict(json.loads(line) for line in text.splitlines() if line.startswith("["))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the losses of a job that runs to its end, by step."""
    said, error = start(tmp_path_factory.mktemp("plain"), "fast").communicate(timeout=120)
    found = losses(said)
    assert sorted(found) == list(range(1, STEPS + 1)), error[-3000:]
    return found


# In the campaign, because each row starts new interpreters, which takes seconds. The program does not handle SIGTERM,
# so SIGTERM ends it as abruptly as SIGKILL.
@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_ended_in_the_middle_of_a_step(
    number: signal.Signals, plain: dict[int, float], tmp_path: Path
) -> None:
    """The signal comes while states are written back; a new job resumes from the last checkpoint with equal losses."""
    job = start(tmp_path, "slow")
    assert job.stdout is not None
    before = ""
    while "writing" not in before:
        line = job.stdout.readline()
        assert line, job.communicate()[1][-3000:]
        before += line
    job.send_signal(number)
    job.communicate(timeout=60)
    swap = tmp_path / "swap"
    assert not list(swap.iterdir())
    said, error = start(tmp_path, "fast").communicate(timeout=120)
    assert {**losses(before), **losses(said)} == plain, error[-3000:]
    assert min(losses(said)) == 4, "it went on from the checkpoint after step 3"
    assert not list(swap.iterdir())
