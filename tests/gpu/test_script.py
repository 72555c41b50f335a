"""bench/gpu.sh, gone through on CPU: every line of it, tables, wrong results, restarts, and what a machine lacks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from bench.gpu import __main__ as main
from bench.gpu import bits, counted, counters, engine, kernels, offload, reasons
from bench.gpu.part import Ended, Outcome, State, Step
from bench.gpu.run import Runner
from bench.gpu.scale import CARD, DRY
from bench.gpu.timeline import counts, require_finite
from tests.gpu.traced import FOLDER, executable, make_wheel, read_lines, traced

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
PARTS = ("bits", "offload", "engine", "kernels", "reasons")
# Lines of shell that name no command: ends of blocks, patterns, and what continues a line.
NO_COMMAND = re.compile(r"\s*(#.*|fi|done|esac|;;|\*\)|else|\"\$WHEELS\"/\*\.whl|)\s*$")


def script(
    folder: Path, *words: str, tree: Path = ROOT, trace: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it with this Python; with ``trace`` the shell says in a file which lines it comes to."""
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    environment.pop("PYTHONPATH", None)
    command = ["bash", str(tree / "bench" / "gpu.sh"), *words]
    if trace:
        # By a file that the shell reads first: root's shells take no PS4 from the environment.
        first = folder / "first"
        first.write_text(f"PS4='+line $LINENO '\nexec 9>{folder / 'shell'}\nBASH_XTRACEFD=9\nset -x\n")
        environment["BASH_ENV"] = str(first)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@dataclass
class Dry:
    """A dry run."""

    folder: Path
    done: subprocess.CompletedProcess[str]

    @property
    def flags(self) -> list[str]:
        return ["--dry-run", f"--keep={self.folder / 'keep'}", f"--results={self.folder / 'results'}"]


def go_through(folder: Path, parts: tuple[str, ...]) -> Dry:
    for name in ("wheels", "lines"):
        (folder / name).mkdir()
    make_wheel(folder / "wheels")
    found = Dry(folder, subprocess.CompletedProcess([], 0))
    places = {"WHEELS": str(folder / "wheels"), FOLDER: str(folder / "lines")}
    found.done = script(folder, *found.flags, *parts, trace=True, **places)
    return found


@pytest.mark.campaign
@pytest.mark.timeout(400)
def test_a_dry_run(tmp_path: Path) -> None:
    """One for all that is held of it: it takes more than a minute."""
    dry = go_through(tmp_path, ())
    reports = every_part_prints_one_table_and_writes_it(dry, PARTS)
    assert "It cannot show collectives" in reports[2] and "| zeropp_clipped |" in reports[2]
    assert len(list((dry.folder / "results").glob("*_gpu-engine-*.json.gz"))) == 2, "a timeline for each system"
    # Before it is started again: lines of restarts are scenarios of their own.
    every_line_is_gone_through(dry)
    started_again_it_goes_on_where_it_was(dry)


@pytest.mark.campaign
def test_a_dry_run_of_some_parts(tmp_path: Path) -> None:
    """Those that have no planted result below in the default suite."""
    parts = ("kernels", "reasons")
    every_part_prints_one_table_and_writes_it(go_through(tmp_path, parts), parts)


def every_part_prints_one_table_and_writes_it(dry: Dry, parts: tuple[str, ...]) -> list[str]:
    assert dry.done.returncode == 0, dry.done.stdout + dry.done.stderr
    reports = dry.done.stdout.split("# ")[1:]
    assert len(reports) == len(parts)
    for part, text in zip(parts, reports, strict=True):
        assert main.DRY_RUN in text and f"torch {torch.__version__}, Triton " in text
        assert sum(line.startswith("|---") for line in text.splitlines()) == 1
        assert f"| {' | '.join(main.PARTS[part].columns)} |" in text
        (written,) = (dry.folder / "results").glob(f"*_gpu-{part}.md")
        assert written.read_text().strip() in dry.done.stdout
    return reports


def started_again_it_goes_on_where_it_was(dry: Dry) -> None:
    """What was measured is kept, also by single tests of a step that was interrupted."""
    again = script(dry.folder, *dry.flags, "bits")
    assert again.returncode == 0 and again.stderr.count("kept from an earlier start") == len(DRY.chosen)
    (kernels,) = (dry.folder / "keep" / "bits").glob("*/kernels")
    lines = (kernels / "outcomes").read_text().splitlines()
    (kernels / "outcome.json").unlink()
    (kernels / "outcomes").write_text("".join(f"{line}\n" for line in lines[1:]))
    again = script(dry.folder, *dry.flags, "bits", "--only=kernels")
    assert again.returncode == 0, again.stdout + again.stderr
    after = (kernels / "outcomes").read_text().splitlines()
    assert [json.loads(line)["test"] for line in after[len(lines) - 1 :]] == [json.loads(lines[0])["test"]]
    assert f"| kernels | {len(lines)} | 0 | 0 |" in again.stdout


def every_line_is_gone_through(dry: Dry) -> None:
    """The shell's by the dry run and two refusals, the package's by the dry run and the scenarios above."""
    told = (dry.folder / "shell").read_text()
    for words in (["everything"], ["--dry-run", "bits", "--only=nothing"]):
        script(dry.folder, *words, trace=True)
        told += (dry.folder / "shell").read_text()
    reached = {int(number) for number in re.findall(r"^\++line (\d+) ", told, re.MULTILINE)}
    commands = {n for n, line in enumerate(SCRIPT.read_text().splitlines(), 1) if not NO_COMMAND.match(line)}
    assert reached and sorted(commands - reached) == []
    with traced() as seen:
        for number, scenario in enumerate(SCENARIOS):
            (dry.folder / str(number)).mkdir()
            scenario(dry.folder / str(number))
    seen |= read_lines(dry.folder / "lines")
    left = {}
    for path in sorted((ROOT / "bench" / "gpu").glob("*.py")):
        missing = executable(path) - {number for name, number in seen if name == path.name}
        if missing:
            left[path.name] = sorted(missing)
    assert left == {}


# Part and step, and what is said of it. How what they come to is read is among the scenarios, for every part.
PLANTED = [
    pytest.param("bits", "kernels", "tests/kernels/test_agreement.py", marks=pytest.mark.campaign),
    pytest.param("engine", "tiny alone", "weights of zeropp_clipped end"),
    pytest.param("kernels", "1", "test_eager[1-dequantize int4]"),
    pytest.param("offload", "bus", "new weights, pinned ring: other values arrived than were sent"),
    pytest.param("reasons", "dequantize", "other bits than by hand", marks=pytest.mark.campaign),
]


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with a wrong sum, clipping left out, a wrong formula by hand, and new weights doubled."""
    tree = tmp_path_factory.mktemp("spoilt")
    for room in ("zeropp", "kernels", "tests", "examples", "bench"):
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    plants = {
        "tests/kernels/agreement.py": ("reference, name)(*plain)", "reference, name)(plain[0] * 2, *plain[1:])"),
        "bench/step_time/systems.py": ('"gradient_clipping": CLIP if', '"gradient_clipping": 0.0 if'),
        "bench/offload/bus.py": ("new.take(0, there.shard)", "new.take(0, there.shard * 2)"),
        "bench/kernels/eager.py": ("(signed.float() * scales", "(signed.float() * 2 * scales"),
    }
    for name, (old, new) in plants.items():
        text = (tree / name).read_text()
        assert text.count(old) == 1, (name, old)
        (tree / name).write_text(text.replace(old, new))
    return tree


@pytest.mark.campaign
@pytest.mark.every(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("part", "step", "said"), PLANTED)
def test_a_wrong_result_ends_with_1_and_is_not_reported(
    part: str, step: str, said: str, spoilt: Path, tmp_path: Path
) -> None:
    flags = ["--dry-run", f"--keep={tmp_path}", f"--results={tmp_path / 'results'}", f"--only={step}"]
    done = script(tmp_path, part, *flags, tree=spoilt, CI="true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong" in done.stderr and said in done.stdout
    assert not (tmp_path / "results").exists()


def test_what_cannot_be_used_ends_with_2(tmp_path: Path) -> None:
    unknown = script(tmp_path, "everything")
    assert unknown.returncode == 2 and "expected bits, offload, engine, kernels, reasons" in unknown.stderr
    if not torch.cuda.is_available():
        without = script(tmp_path, "bits")
        assert without.returncode == 2 and "torch sees no CUDA device" in without.stderr
    nothing = script(tmp_path, "--dry-run", "bits", "--only=nothing")
    assert nothing.returncode == 2 and "no step's name begins so" in nothing.stderr


# What a dry run that goes well does not come to. Each is a test of its own below.


def ended(folder: Path, code: int | None, log: str, **files: str) -> Ended:
    """A step's end; ``files`` have names without suffix."""
    (folder / "log").write_text(log)
    for name, text in files.items():
        (folder / {"outcomes": "outcomes"}.get(name, f"{name}.json")).write_text(text)
    return Ended(code, folder / "log", folder)


def every_step_says_why(folder: Path) -> None:
    """Out of time is no wrong result, and a program that fails is none that is measured."""
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


def what_a_machine_lacks_is_said(folder: Path) -> None:
    with mock.patch.object(reasons.shutil, "which", lambda tool: None):
        steps = reasons.PART.steps(CARD)
    runner = Runner(folder, "key", time.monotonic() + 60)
    assert runner.outcome(steps[0])[0] == Outcome(State.ABSENT, [], steps[0].lacks or "")
    assert "ncu is not on PATH" in (steps[0].lacks or "") and len(steps) == len(counted.OPERATIONS)
    small = mock.Mock(total_memory=24 << 30)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda index: small):
        lacking = {step.name: step.lacks for step in engine.PART.steps(CARD) if step.lacks}
    assert lacking["3 B alone"] == "needs about 68 GiB, and the card has 24" and "0.3 B in turns" not in lacking
    card = mock.patch.object(torch.cuda, "get_device_properties", lambda index: small)
    with card, mock.patch.object(offload.shutil, "disk_usage", lambda path: mock.Mock(free=30 << 30)):
        lacking = {step.name: step.lacks for step in offload.PART.steps(CARD)}
    assert lacking["3 B none"] == "needs about 68 GiB of the card, and there are 24" and lacking["1 B none"] is None
    assert lacking["3 B nvme"] == "needs about 45 GiB of the disk's free space, and there are 30"
    with mock.patch.object(main.importlib.util, "find_spec", lambda name: None):
        assert "pytest, pydantic not installed; put wheels" in (main.unusable(bits.PART, DRY) or "")
        with mock.patch.object(torch.cuda, "is_available", lambda: False):
            assert main.main(["bits", "--dry-run", f"--keep={folder}", f"--results={folder}"]) == 2
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        assert "torch sees no CUDA device" in (main.unusable(bits.PART, CARD) or "")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:  # gone, perhaps while it was read
        return False


def time_runs_out(folder: Path) -> None:
    """The process ends with all that it has started, and nothing is started that cannot end."""

    def read(ended: Ended) -> Outcome:
        return Outcome(State.UNFINISHED if ended.code is None else State.MEASURED, [])

    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    step = Step("slow one", [sys.executable, "-c", child], 1.5, read)
    found, _ = Runner(folder, "key", time.monotonic() + 60).outcome(step)
    assert found.state is State.UNFINISHED
    pid = int((folder / "key" / "slow-one" / "log").read_text())
    # Its parent is gone, and who takes it over buries it in its own time.
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
           "percent_of_copy": None, "target": 0}  # fmt: skip
    assert kernels._row(row)["% of copy"] == "-"
    took = {"step_s": [1.0], "host_s": [1.0], "cpu_s": [1.0], "peak_bytes": 1 << 20, "weights_apart": 0}
    measured = {"settings": {"ranks": 1}, "systems": {"ddp": took}}
    assert engine._row("1 B alone", "1 B", "ddp", measured)["peak MiB"] == "1"


def systems_are_compared(folder: Path) -> None:
    """By their losses; ratios are to FSDP2's step, where that is there."""
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


SCENARIOS: list[Callable[[Path], None]] = [
    every_step_says_why, bits_are_counted_by_test, counters_are_read, what_a_machine_lacks_is_said, time_runs_out,
    rows_and_traces_are_read, systems_are_compared,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_what_goes_otherwise(scenario: Callable[[Path], None], tmp_path: Path) -> None:
    scenario(tmp_path)
