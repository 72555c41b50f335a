"""Scenarios of bench/gpu that a successful dry run does not reach; each is a test in ``test_gpu_script.py``."""

from __future__ import annotations

import faulthandler
import json
import lzma
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench.gpu import __main__ as main
from bench.gpu import (
    bits,
    counted,
    counters,
    engine,
    examples,
    kernels,
    look,
    memory,
    nccl,
    nccl_ranks,
    offload,
    reasons,
)
from bench.gpu.part import Ended, Outcome, State, Step
from bench.gpu.run import Runner
from bench.gpu.scale import CARD, DRY
from bench.gpu.timeline import counts, require_finite

__all__ = ["SCENARIOS"]


def ended(folder: Path, code: int | None, log: str, **files: str) -> Ended:
    """Return a step's `Ended` with an output ``log``. Each keyword is a result file, named without its suffix."""
    (folder / "log").write_text(log)
    for name, text in files.items():
        (folder / {"outcomes": "outcomes"}.get(name, f"{name}.json")).write_text(text)
    return Ended(code, folder / "log", folder)


def every_step_says_why(folder: Path) -> None:
    """Check that each step is "unfinished" without time and "wrong" after a failure, with the reason in both cases."""
    for part in main.PARTS.values():
        for step in part.steps(DRY):
            late = step.read(ended(folder, None, "half way"))
            assert late.state is State.UNFINISHED and late.why, step.name
            failed = step.read(ended(folder, 9, "it says so"))
            assert failed.state is State.WRONG and "it says so" in failed.why, step.name


def bits_are_counted_by_test(folder: Path) -> None:
    def line(test: str, outcome: str, reason: str = "") -> str:
        return json.dumps({"test": test, "outcome": outcome, "seconds": 1.0, "reason": reason}) + "\n"

    with mock.patch.object(bits, "_has", lambda module: False):
        step = bits.PART.steps(DRY)[0]
        assert "-n" not in step.command and not any("--timeout" in word for word in step.command)
        found = step.read(
            ended(folder, 0, "", outcomes=line("a", "failed") + line("a", "passed") + line("b", "skipped", "why"))
        )
        assert found.state is State.MEASURED, "what failed before has passed"
        assert found.rows[0]["note"] == "why; pytest-xdist is not installed: one process in place of 1"
        wrong = step.read(ended(folder, 1, "", outcomes=line("a", "passed") + line("b", "failed")))
        assert wrong.state is State.WRONG and wrong.why.startswith("b and 0 more")
    card = bits.PART.steps(replace(CARD, chosen={"streams": ()}))[0]
    assert card.read(ended(folder, 0, "", outcomes=line("a", "skipped", "why"))).state is State.WRONG


def counters_are_read(folder: Path) -> None:
    columns = list(counters.COUNTERS)
    stall = [counters._STALL.format(name) for name in ("wait", "long_scoreboard")]
    values = ["0,k(int),1500,2000000,91.5,20.0,75,n/a,1.5,12.0", "1,k,1,1,10,70,5,8,0,0", "2,k,1,1,10,20,5,8,0,0"]
    rows = [",".join(f'"{value}"' for value in row.split(",")) for row in values]
    head = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *columns, *stall))
    text = "\n".join(["==PROF== Connected", head, '""' + ',""' * (len(columns) + 3), *rows])
    (folder / "counters.csv").write_text(text)
    step = reasons.PART.steps(DRY)[0]
    found = step.read(ended(folder, 0, ""))
    assert [row["bound by"] for row in found.rows] == ["memory", "computing", "latency"]
    first = found.rows[0]
    assert (first["kernel"], first["us"], first["MB of DRAM"], first["registers"]) == ("k", "1.5", "2.0", "-")
    assert first["warps wait for"].startswith("long_scoreboard 12.0, wait 1.5")
    (folder / "counters.csv").write_text("==ERROR== ERR_NVGPUCTRPERM - no permission")
    assert step.read(ended(folder, 1, "")).state is State.ABSENT
    (folder / "counters.csv").write_text("==PROF== nothing")
    assert step.read(ended(folder, 0, "")).state is State.WRONG
    (folder / "counters.csv").unlink()
    assert step.read(ended(folder, 1, "copy: other bits than by hand")).state is State.WRONG


def missing_requirements_are_reported(folder: Path) -> None:
    with mock.patch.object(reasons.shutil, "which", lambda tool: None):
        steps = reasons.PART.steps(CARD)
    runner = Runner(folder, "key", time.monotonic() + 60)
    assert runner.outcome(steps[0])[0] == Outcome(State.ABSENT, [], steps[0].lacks or "")
    assert "ncu is not on PATH" in (steps[0].lacks or "") and len(steps) == len(counted.OPERATIONS)
    small = mock.Mock(total_memory=32 << 30)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda index: small):
        lacking = {step.name: step.lacks for step in engine.PART.steps(CARD) if step.lacks}
    assert lacking["3 B alone"] == "needs about 68 GiB, and the card has 32" and "0.3 B in turns" not in lacking
    large = mock.patch.object(torch.cuda, "get_device_properties", lambda index: mock.Mock(total_memory=80 << 30))
    with large, mock.patch.object(bits.importlib.util, "find_spec", {"pytest": True}.get):
        lacking = {step.name: step.lacks for step in [*look.PART.steps(CARD), *examples.PART.steps(CARD)]}
    assert lacking["1.3 B deepspeed_clipped"] == "deepspeed not installed" and lacking["1.3 B plain_clipped"] is None
    assert lacking["256 MiB"] == "pytest_benchmark not installed" and lacking["engine"] is None
    assert lacking["hf_trainer"] == "transformers, accelerate, safetensors not installed"
    assert "two cards" in (lacking["train_fsdp2"] or "") and lacking["trl_style_loop"] is None
    card = mock.patch.object(torch.cuda, "get_device_properties", lambda index: small)
    with card, mock.patch.object(offload.shutil, "disk_usage", lambda path: mock.Mock(free=30 << 30)):
        lacking = {step.name: step.lacks for step in offload.PART.steps(CARD)}
    assert lacking["3 B none"] == "needs about 68 GiB of the card, and there are 32" and lacking["1 B none"] is None
    assert lacking["3 B nvme"] == "needs about 45 GiB of the disk's free space, and there are 30"
    with mock.patch.object(bits.importlib.util, "find_spec", lambda name: None):
        assert "pytest, pydantic not installed; put wheels" in (main.unusable(bits.PART, DRY) or "")
        with mock.patch.object(torch.cuda, "is_available", lambda: False):
            assert main.main(["bits", "--dry-run", f"--keep={folder}", f"--results={folder}"]) == 2
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        assert "torch sees no CUDA device" in (main.unusable(bits.PART, CARD) or "")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:  # the process is gone, perhaps since it was opened
        return False


def time_runs_out(folder: Path) -> None:
    """Check that a process is killed with its children at its time limit, and that no step starts without time."""

    def read(ended: Ended) -> Outcome:
        return Outcome(State.UNFINISHED if ended.code is None else State.MEASURED, [])

    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    step = Step("slow one", [sys.executable, "-c", child], 1.5, read)
    found, _ = Runner(folder, "key", time.monotonic() + 60).outcome(step)
    assert found.state is State.UNFINISHED
    pid = int((folder / "key" / "slow-one" / "log").read_text())
    # The child's parent is dead. The process that adopts the child reaps it a little later.
    until = time.monotonic() + 10
    while (runs := _runs(pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not runs
    none, _ = Runner(folder, "key", time.monotonic() + 1).outcome(step)
    assert none == Outcome(State.UNFINISHED, [], "no time was left for it")
    quick = Step("quick", [sys.executable, "-c", ""], 60, read)
    assert [Runner(folder, "key", time.monotonic() + 60).outcome(quick)[1] for _ in range(2)] == [False, True]
    assert not Runner(folder, "other sources", time.monotonic() + 60).outcome(quick)[1]
    assert main.main(["kernels", "--dry-run", "--seconds=1", f"--keep={folder}", f"--results={folder}"]) == 3
    assert main.main(["kernels", "--dry-run", "--only=x", f"--keep={folder}", f"--results={folder}"]) == 2


def steps_run_together(folder: Path) -> None:
    """Check that steps run at the same time (each waits for the other), and that all end if the part must end."""

    def read(ended: Ended) -> Outcome:
        return Outcome(State.UNFINISHED if ended.code is None else State.MEASURED, [])

    def leave(ended: Ended) -> Outcome:
        raise SystemExit(3)

    meets = "import pathlib, sys, time\nme, other = map(pathlib.Path, sys.argv[1:3])\nme.write_text('')\n"
    meets += "while not other.exists():\n    time.sleep(0.05)\n"
    runner = Runner(folder, "key", time.monotonic() + 60)

    def step(me: str, other: str, more: str, read: Callable[[Ended], Outcome]) -> Step:
        command = [sys.executable, "-c", meets + more, str(folder / me), str(folder / other)]
        return Step(me, command, 50, read, together=True)

    found = runner.outcomes([step("a", "b", "", read), step("b", "a", "", read)])
    assert [outcome.state for outcome, _ in found] == [State.MEASURED, State.MEASURED]
    begin = time.monotonic()
    endless = "import os; print(os.getpid(), flush=True); me.with_suffix('.late').write_text(''); time.sleep(600)"
    with pytest.raises(SystemExit):
        runner.outcomes([step("c", "d.late", "", leave), step("d", "c", endless, read)])
    assert time.monotonic() - begin < 40 and not _runs(int((folder / "key" / "d" / "log").read_text()))


def memory_is_told_by_phase(folder: Path) -> None:
    """Check that the reported holders are those at the peak of backward.

    Some tensors of forward are freed by then, and some tensors of backward do not exist yet.
    """
    ours = [{"filename": "c.cpp", "line": 1, "name": "g"}, {"filename": "/a/params/unit.py", "line": 3, "name": "f"}]
    events = [
        {"action": "alloc", "addr": 1, "size": 10 << 20, "frames": ours},
        {"action": "alloc", "addr": 2, "size": 100 << 20, "frames": []},
        {"action": "free_completed", "addr": 9, "size": 50 << 20},  # allocated before the recording started
        {"action": "segment_alloc", "addr": 1, "size": 1 << 30},
        {"action": "alloc", "addr": 3, "size": 50 << 20, "frames": ours},
        {"action": "free_requested", "addr": 2, "size": 100 << 20},
        {"action": "free_completed", "addr": 2, "size": 100 << 20},
        {"action": "alloc", "addr": 4, "size": 20 << 20, "frames": []},
    ]
    assert memory.holders([], 0) == []
    taken = iter([events[:4], events])
    nothing = {"before": 0, "live": iter([5 << 20] * 5), "most": iter([7 << 20] * 4)}
    calls: list[object] = []
    with (
        mock.patch.multiple(memory, MemoryMeter=lambda device: None, meet=lambda device: None),
        mock.patch.object(torch.cuda, "memory_allocated", lambda device: next(nothing["live"])),
        mock.patch.object(torch.cuda, "max_memory_allocated", lambda device: next(nothing["most"])),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset")),
        mock.patch.object(torch.cuda.memory, "_record_memory_history", lambda on, **how: calls.append(on)),
        mock.patch.object(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [next(taken)]}),
    ):
        found = memory.step_by_phases(mock.Mock(), memory.Recorder(torch.device("cuda", 0)))
    assert calls == ["reset", "all", "reset", "reset", None, "reset"]
    (step,) = (step for step in look.PART.steps(DRY) if step.name == "live memory")
    rows = step.read(ended(folder, 0, "", memory=json.dumps({"zeropp": found}))).rows
    assert [row["subject"] for row in rows[:2]] == ["zeropp, between steps", "zeropp, after forward"]
    assert (rows[0]["live MiB"], rows[0]["peak MiB"], len(rows)) == ("0", "2", 6)
    assert rows[4]["live MiB"] == "100" and rows[4]["note"].startswith("1 from autograd")
    assert rows[5]["live MiB"] == "60" and rows[5]["note"] == "2 from params/unit.py:3 f"


def systems_of_other_steps_are_compared(folder: Path) -> None:
    """Check that losses are compared with those of earlier steps, because each large system has its own process."""
    steps = {step.name: step for step in look.PART.steps(DRY)}

    def measured(system: str, step_s: float, *losses: float) -> Outcome:
        took = {"step_s": [step_s], "host_s": [1.0], "cpu_s": [1.0], "losses": losses, "norms": [4.0, 3.0],
                "weights_apart": 0.0, "weights_way": 1.0}  # fmt: skip
        place = folder / f"tiny-{system}"
        place.mkdir(exist_ok=True)
        result = json.dumps({"systems": {system: took}, "card": {}})
        return steps[f"tiny {system}"].read(ended(place, 0, "", result=result))

    assert "/ FSDP2" not in measured("plain_clipped", 2.0, 4.0, 3.0).rows[0]
    (row,) = measured("fsdp2_clipped", 3.0, 4.0, 3.0).rows
    assert (row["check"], row["subject"], row["/ plain"], row["/ FSDP2"]) == ("tiny", "fsdp2_clipped", "1.500", "1.000")
    (row,) = measured("deepspeed_clipped", 6.0, 4.0, 3.01).rows
    assert (row["/ plain"], row["/ FSDP2"]) == ("3.000", "2.000")
    wrong = measured("deepspeed_clipped", 6.0, 4.0, 2.0)
    assert wrong.state is State.WRONG and "losses of deepspeed_clipped and fsdp2_clipped differ" in wrong.why


def the_last_lines_of_an_example_fit_a_cell(folder: Path) -> None:
    (step, *_) = examples.PART.steps(DRY)
    (row,) = step.read(replace(ended(folder, 0, f"a\nb | c\x07\n{folder}/d\n\n"), seconds=12.3)).rows
    assert row == {"example": "train_gpt", "exit code": "0", "seconds": "12", "last lines": "a; b / c ; ./d"}
    failed = step.read(ended(folder, 1, "why"))
    assert failed.state is State.WRONG and failed.rows[0]["last lines"] == "why" and "exit code 1; why" in failed.why
    for said in ("step 3: loss nan, rate 1", "{'loss': nan}", "train_loss=-inf"):
        spoilt = step.read(ended(folder, 0, said))
        assert spoilt.state is State.WRONG and spoilt.why.startswith("it printed"), said
    assert step.read(ended(folder, 0, "loss 0.5, no finance")).state is State.MEASURED
    given = main.parse_arguments(["examples", "--dry-run", f"--keep={folder}", f"--results={folder / 'kept'}"])
    written = main.save(given, examples.PART, "report", {"date": "today"}, {"train_gpt": failed})
    assert [path.name for path in written] == ["today_gpu-examples.md", "today_gpu-examples.json"]
    with mock.patch.object(examples, "missing", lambda *modules: None):
        assert "stand-in for it refuses" in (examples._lacks("trl_style_loop") or "")


def rows_and_traces_are_read(folder: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "ncclKernel", "ts": 0, "dur": 1000},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 500, "dur": 1000},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0, "dur": 250},
        {"ph": "i", "name": "mark"},
    ]
    assert counts(events) == {"busy_ms": 1.5, "waits_ms": 0.25, "launches": 2, "nccl": 1}
    with pytest.raises(SystemExit, match="zeropp: losses are not finite"):
        require_finite("zeropp", torch.tensor([1.0, float("nan")]))
    require_finite("zeropp", torch.ones(2))
    given = main.parse_arguments(["bits", "--dry-run", f"--keep={folder}", f"--results={folder / 'new'}"])
    assert main.save(given, bits.PART, "", {"date": "today"}, {"a step": Outcome(State.WRONG, [])}) == []
    twin = mock.Mock(ours=lambda: [torch.ones(2)], by_hand=lambda: [torch.zeros(2)])
    with pytest.raises(SystemExit, match="other bits than by hand"):
        counted.check("an operation", twin)
    calls: list[str] = []
    marks = {name: (lambda name=name: calls.append(name)) for name in ("start", "stop")}
    still = mock.patch.object(torch.cuda, "synchronize", lambda: None)
    with mock.patch.multiple(torch.cuda.profiler, **marks), still, counted.profiled():
        calls.append("work")
    assert calls == ["start", "work", "stop"]
    row = {"operation": "copy", "contender": "c", "mebibytes": 1, "seconds": 1.0, "gigabytes_per_second": 1.0,
           "percent_of_copy": None, "target": 0, "device": "NVIDIA H200"}  # fmt: skip
    made = kernels._row({**row, "gigabytes_per_second": 2400.0})
    assert made["% of copy"] == "-" and made["% of data sheet"] == "50"
    assert made.keys() - {"operation", "by", "MiB"} < set(look.PART.columns)
    took = {"step_s": [1.0], "host_s": [1.0], "cpu_s": [1.0], "peak_bytes": 1 << 20, "weights_apart": 0}
    measured = {"settings": {"ranks": 1}, "systems": {"ddp": took}}
    assert engine._row("1 B alone", "1 B", "ddp", measured)["peak MiB"] == "1"


def systems_are_compared(folder: Path) -> None:
    """Check that systems are compared by their losses, and that ratios to FSDP2 appear if FSDP2 was measured."""
    steps = {step.name: step for step in offload.PART.steps(DRY)}

    def measured(name: str, *losses: float) -> Outcome:
        arm = {"step_s": [2.0], "both_s": [3.0], "forward_s": [1.0]}
        (folder / name).mkdir(exist_ok=True)
        text = json.dumps({"losses": losses, "arms": {"": arm}, "bound_s": None, "host_bytes": 1 << 20})
        return steps[name.replace("-", " ")].read(ended(folder / name, 0, "", race=text))

    assert measured("tiny-cpu", 4.0, 3.0).rows[0].get("/ FSDP2") is None
    found = measured("tiny-fsdp2", 4.0, 3.0)
    assert found.state is State.MEASURED and found.rows[0]["exposed ms"] == "2000.0"
    assert measured("tiny-cpu", 4.0, 3.01).rows[0]["/ FSDP2"] == "1.000"
    for loss in (2.0, float("nan")):
        wrong = measured("tiny-cpu", 4.0, loss)
        assert wrong.state is State.WRONG and "are not those of fsdp2, [4.0, 3.0]" in wrong.why


def a_library_is_put_before_torchs(folder: Path) -> None:
    """Check that an .xz file is unpacked once, and that a library is refused if it is too old or cannot be loaded."""
    packed = folder / "libnccl.so.2.xz"
    packed.write_bytes(lzma.compress(b"a library"))
    whole = nccl.unpacked(packed)
    assert whole == (folder / "libnccl.so.2").resolve() and whole.read_bytes() == b"a library"
    whole.write_bytes(b"kept")
    assert nccl.unpacked(packed).read_bytes() == b"kept" and nccl.unpacked(whole) == whole

    def library(version: int) -> object:
        def answer(number: Any) -> None:
            number._obj.value = version

        return mock.patch.object(nccl.ctypes, "CDLL", lambda path: mock.Mock(ncclGetVersion=answer))

    with mock.patch.dict(nccl.os.environ, {nccl.LIBRARY: str(packed)}):
        with library(23004):
            variables, lacks = nccl.surroundings(False)
        assert lacks is None and variables["LD_PRELOAD"] == str(whole) and nccl.surroundings(True) == ({}, None)
        assert variables["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        with library(22809):
            steps = nccl.PART.steps(CARD)
        *many, alone = (step.lacks for step in sorted(steps, key=lambda step: step.name == "launch queue"))
        assert all("NCCL 2.28.9 is in use" in (each or "") and "Set NCCL_LIBRARY" in (each or "") for each in many)
        assert alone is None
        lacks = nccl.surroundings(False)[1] or ""
        assert "libnccl.so.2.xz cannot be loaded" in lacks and "Set NCCL_LIBRARY" in lacks
    with mock.patch.dict(nccl.os.environ), library(23102):
        nccl.os.environ.pop(nccl.LIBRARY, None)
        variables, lacks = nccl.surroundings(False)
        assert lacks is None and "LD_PRELOAD" not in variables


_RANK = """#!/bin/sh
program=$3 folder=$4 name=$5
say() { echo "{\\"name\\": \\"$name\\", \\"rank\\": $RANK, $1}" >> "$folder/found"; }
case $program-$name in
    collectives-) [ -z "$NCCL_P2P_DISABLE" ] || say '"wrong": ""' ;;
    train-passes)
        [ "$RANK" = 0 ] || exec sleep 600
        say '"wrong": ""'
        name=$6
        say '"error": "it fails"'
        exit 1 ;;
    train-hangs) exec sleep 600 ;;
    train-*) [ "$RANK" = 1 ] || say '"wrong": ""' ;;
esac
"""
"""A shell script in place of a rank's Python: ways in which two ranks end or hang."""


def ranks_fail_and_hang(folder: Path) -> None:
    """Check that other transports are tried, that a failed or hung case stops no other, and that no rank survives."""
    python = folder / "python"
    python.write_text(_RANK)
    python.chmod(0o755)
    with mock.patch.object(nccl.sys, "executable", str(python)):
        place = folder / "collectives-2"
        place.mkdir()
        launcher = nccl._Launcher(place, "collectives", 2, [], 0.0)
        with mock.patch.object(nccl, "TRANSPORTS", nccl.TRANSPORTS[:2]):
            launcher.find_transport(5)
        with pytest.raises(SystemExit, match="'collectives 2' has found no way"):
            nccl.main([str(folder / "training-2"), "train", "2", "stage 1", "--dry-run"])
        launcher.find_transport(5)
        way = json.loads((place / "transport.json").read_text())
        assert way == nccl.TRANSPORTS[2]
        launcher = nccl._Launcher(folder / "training-2", "train", 2, [], 0.0)
        launcher.folder.mkdir()
        began = time.monotonic()
        launcher.train(["passes", "fails", "hangs", "also passes"], 0.5)
        assert time.monotonic() - began < 30 and launcher.transport() == way
        before = nccl.notes(launcher.folder)
        launcher.train(["passes", "also passes"], 0.5)
        assert nccl.notes(launcher.folder) == before, "what has passed is not run again"
    found = nccl._last(launcher.folder)
    assert {name: each.get("error") for name, each in found.items()} == {
        "passes": None, "fails": "it fails", "hangs": "the ranks ended or hung without a result in 0.5 s",
        "also passes": None,
    }  # fmt: skip
    names = [*found, "never begun"]
    wrong = nccl._read_training(2, ["fails"], Ended(0, folder, launcher.folder))
    assert wrong.state is State.WRONG and wrong.why.startswith("fails: it fails; hangs: the ranks")
    assert wrong.rows == [{"check": "fails", "ranks": "2", "result": "failed", "note": "it fails"}]
    nccl.note(launcher.folder, name="fails", rank=1, error="again")
    nccl.note(launcher.folder, name="fails", rank=0, wrong="")
    nccl.note(launcher.folder, name="hangs", rank=0, wrong="")
    with mock.patch.object(nccl, "_training_row", lambda *found: {}):
        late = nccl._read_training(2, names, Ended(None, folder, launcher.folder))
    assert late.state is State.UNFINISHED and late.why.startswith("time ran out before never begun and 0 more")


def ranks_are_judged(folder: Path) -> None:
    """Check the outcomes for the results that ranks wrote, and for missing results."""

    def told(read: Callable[[Ended], Outcome], *lines: dict[str, Any]) -> Outcome:
        (folder / "found").unlink(missing_ok=True)
        for line in lines:
            nccl.note(folder, **line)
        return read(ended(folder, 0, ""))

    steps = {step.name: step.read for step in nccl.PART.steps(DRY)}
    wrong = told(steps["collectives 2"], {"name": "collectives", "rank": 1, "wrong": "all_reduce"})
    assert (wrong.state, wrong.why) == (State.WRONG, "rank 1: all_reduce")
    assert told(steps["collectives 2"], {"name": "collectives", "rank": 1, "wrong": ""}).state is State.WRONG

    def lost(kind: str, said: str, seconds: float, *more: dict[str, Any], closed: float = 1.0) -> str:
        lines = [{"name": kind, "rank": 0, "said": said, "seconds": seconds}, *more]
        return told(steps[f"{kind} 2"], *lines, {"name": "closed", "rank": 0, "seconds": closed}).why

    most = DRY.ranks.hang_timeout + nccl.GRACE
    assert lost("killed", "rank 1 reported nothing", most) == ""
    assert f"rank 0 was heard after {most + 1:.1f} s, and {most:g}" in lost(
        "killed", "rank 1 reported nothing", most + 1
    )
    assert lost("stopped", "", 1.0) == "rank 0 does not name rank 1: no error"
    assert "close() of rank 0 did not return" in lost("stopped", "rank 1 reported nothing", 1.0, closed=most + 1)
    both = lost("raising", "rank 1 failed", 1.0, {"name": "did not end", "rank": 0})
    assert both.startswith("rank 0 did not end; rank 1 said nothing and was killed; rank 1, which raised, got another")
    queue = {"name": "launch queue", "rank": 0, "launch": 2.0, "queries": 9, "query": 0.01, "returned": True}
    assert told(steps["launch queue"], queue).rows[0]["result"] == "queries return"
    assert told(steps["launch queue"], {**queue, "query": 2.0}).why.startswith("the thread that watches")
    assert told(steps["launch queue"], {**queue, "launch": 0.1}).why.startswith("no launch had to wait")


def ranks_record_errors_before_they_end(folder: Path) -> None:
    """Check that ranks record an error before they end, and that the launch queue program runs with fake CUDA."""
    assert nccl_ranks.beyond(1.0, 1.0, (1.0, 1.0), "elsewhere") == []
    assert nccl_ranks.beyond(float("inf"), 1.0, (1.0, 1.0), "elsewhere")[0].startswith("losses are inf")
    group = {"init_process_group": mock.DEFAULT, "get_rank": lambda: 1}
    failing = mock.patch.object(nccl_ranks, "train_case", side_effect=RuntimeError("planted"))
    with mock.patch.multiple(nccl_ranks.dist, **group), failing, pytest.raises(RuntimeError, match="planted"):
        nccl_ranks.train_cases(["stage 1"], folder, DRY.ranks, torch.device("cpu"))
    faulthandler.cancel_dump_traceback_later()
    assert nccl.notes(folder) == [{"name": "stage 1", "rank": 1, "error": "RuntimeError('planted')"}]
    (folder / "found").unlink()
    card = {"set_device": mock.DEFAULT, "synchronize": mock.DEFAULT, "Event": mock.DEFAULT, "_sleep": mock.DEFAULT}
    with mock.patch.multiple(torch.cuda, **card) as calls:
        calls["_sleep"].side_effect = lambda cycles: None
        nccl_ranks.launch_queue([], folder, DRY.ranks, torch.device("cpu"))
        over = mock.Mock(wait=mock.Mock(side_effect=[False, True]))
        took: list[float] = []
        nccl_ranks.ask(torch.cuda.Event(), over, torch.device("cpu"), took)
    (told,) = nccl.notes(folder)
    assert told["returned"] and len(took) == 1


SCENARIOS: list[Callable[[Path], None]] = [
    every_step_says_why, bits_are_counted_by_test, counters_are_read, missing_requirements_are_reported, time_runs_out,
    steps_run_together, memory_is_told_by_phase, systems_of_other_steps_are_compared,
    the_last_lines_of_an_example_fit_a_cell, rows_and_traces_are_read, systems_are_compared,
    a_library_is_put_before_torchs, ranks_fail_and_hang, ranks_are_judged, ranks_record_errors_before_they_end,
]  # fmt: skip
