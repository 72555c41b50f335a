"""bench/gpu.sh on a CPU: a dry run reaches every line, wrong results are not reported, and a restart continues."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as main
from bench.gpu.scale import DRY
from bench.tests.gpu_scenarios import SCENARIOS
from bench.tests.traced_lines import FOLDER, executable, make_wheel, read_lines, traced

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"
PARTS = ("look", "examples", "bits", "nccl", "offload", "engine", "kernels", "reasons")
# Shell lines without a command: ends of blocks, patterns, and continuation lines.
NO_COMMAND = re.compile(r"\s*(#.*|fi|done|esac|;;|\*\)|else|\"\$WHEELS\"/\*\.whl|)\s*$")


def script(
    folder: Path, *words: str, tree: Path = ROOT, trace: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script with this Python. With ``trace``, the shell writes the numbers of executed lines to a file."""
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    environment.pop("PYTHONPATH", None)
    command = ["bash", str(tree / "bench" / "gpu.sh"), *words]
    if trace:
        # BASH_ENV names a file that the shell reads first. PS4 in the environment would not work for root.
        first = folder / "first"
        first.write_text(f"PS4='+line $LINENO '\nexec 9>{folder / 'shell'}\nBASH_XTRACEFD=9\nset -x\n")
        environment["BASH_ENV"] = str(first)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@dataclass
class Dry:
    """A dry run and its folder."""

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
@pytest.mark.timeout(900)
def test_a_dry_run(tmp_path: Path) -> None:
    """All checks share one dry run, because it takes minutes."""
    dry = go_through(tmp_path, ())
    reports = dict(zip(PARTS, every_part_prints_one_table_and_writes_it(dry, PARTS), strict=True))
    assert "It cannot show collectives" in reports["engine"] and "| fsdp2_clipped_again |" in reports["engine"]
    for said in (
        "| kernels | - |",
        "| zeropp_clipped, after backward |",
        "tiny, blocks compiled",
        "offload tiny fsdp2",
    ):
        assert said in reports["look"]
    assert "| deepspeed_style | 0 |" in reports["examples"]
    assert len(list((dry.folder / "results").glob("*_gpu-engine-*.json.gz"))) == 2, "a timeline for each system"
    # Before the restart below, which overwrites the traces.
    every_line_is_gone_through(dry)
    started_again_it_goes_on_where_it_was(dry)


@pytest.mark.campaign
def test_a_dry_run_of_some_parts(tmp_path: Path) -> None:
    """The parts that have no planted error in the default suite below."""
    parts = ("kernels", "nccl", "reasons")
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
    """Check that stored results are kept, and that an interrupted step only repeats the tests that have not passed."""
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
    """Check that all lines are reached: of the script by runs and refusals, of the package by runs and scenarios."""
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


# (part, step, text in its report). Scenarios check the reading of results of every part.
PLANTED = [
    pytest.param("bits", "kernels", "tests/kernels/test_agreement.py", marks=pytest.mark.campaign),
    pytest.param("engine", "tiny alone", "weights of zeropp_clipped end"),
    pytest.param("kernels", "1", "test_eager[1-dequantize int4]"),
    pytest.param("nccl", "training 2", "tensors have other bits than over gloo"),
    pytest.param("offload", "bus", "new weights, pinned: other values arrived than were sent"),
    pytest.param("reasons", "dequantize", "other bits than by hand", marks=pytest.mark.campaign),
]


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with planted errors: wrong sums, a wrong formula, no clipping, doubled values."""
    tree = tmp_path_factory.mktemp("spoilt")
    for room in ("zeropp", "kernels", "tests", "examples", "bench"):
        shutil.copytree(ROOT / room, tree / room, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    plants = {
        "tests/kernels/agreement.py": ("reference, name)(*plain)", "reference, name)(plain[0] * 2, *plain[1:])"),
        "bench/step_time/systems.py": ('"gradient_clipping": CLIP if', '"gradient_clipping": 0.0 if'),
        "bench/offload/bus.py": ("new.take_new_weights(0, staged)", "new.take_new_weights(0, staged * 2)"),
        "bench/common/staged.py": ("(staged[1], staged[0], output_sizes", "(staged[1], staged[0] * 2, output_sizes"),
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
    # Parts with keeps_wrong write their report, because its rows are not measurements.
    assert (tmp_path / "results").exists() == main.PARTS[part].keeps_wrong


def test_unusable_arguments_end_with_exit_status_2(tmp_path: Path) -> None:
    unknown = script(tmp_path, "everything")
    assert unknown.returncode == 2 and f"expected {' '.join(PARTS)}, or none" in unknown.stderr
    if not torch.cuda.is_available():
        without = script(tmp_path, "bits")
        assert without.returncode == 2 and "torch sees no CUDA device" in without.stderr
    nothing = script(tmp_path, "--dry-run", "bits", "--only=nothing")
    assert nothing.returncode == 2 and "no step's name begins so" in nothing.stderr


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenarios_beyond_a_successful_run(scenario: Callable[[Path], None], tmp_path: Path) -> None:
    scenario(tmp_path)
