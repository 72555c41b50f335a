"""The kernels under the oldest Triton that the package asks for: machine code within its budgets, and the same bits.

The other tests run under the newest. The older one is installed into a folder of its own, which comes before this
environment's packages on the path of new processes; so it meets the same torch, and numpy, as the newest one does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

pytestmark = pytest.mark.campaign  # to install it and to start processes takes half a minute
ROOT = Path(__file__).resolve().parents[2]

# With what is for the campaign, too: these tests choose for themselves.
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]


def declared() -> str:
    """The oldest version that pyproject.toml allows."""
    found = re.search(r'"triton>=(\d+\.\d+)', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return f"{found.group(1)}.0"


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that Triton, and nothing else."""
    folder = tmp_path_factory.mktemp("triton")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "site")]
    done = subprocess.run([*install, f"triton=={declared()}"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"pip cannot get triton=={declared()}: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return folder


def run_under(folder: Path, *arguments: str, interpret: str) -> str:
    """What a Python process prints that finds the older Triton first."""
    path = os.pathsep.join([str(folder / "site"), *(entry for entry in sys.path if entry)])
    own = {"TRITON_INTERPRET": interpret, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    # Of the tests that run this one a process of pytest must not know.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([sys.executable, *arguments], env={**env, **own}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_it_is_the_one_that_runs(oldest: Path) -> None:
    program = "import triton, torch, importlib.metadata as about; print(triton.__version__, about.version('triton'))"
    assert run_under(oldest, "-c", program, interpret="0").split() == [declared()] * 2


@pytest.mark.timeout(600)
def test_some_settings_on_sm_90(oldest: Path) -> None:
    """Only of the kernels that quantize; a campaign has every kernel on every target."""
    command = ["-m", "zeropp_kernels.aot", "--cover", "each", "--targets", "sm_90", "--only", "quantize"]
    assert " 0 wrong" in run_under(oldest, *command, interpret="0")


@pytest.mark.timeout(600)
def test_bits_under_the_interpreter(oldest: Path) -> None:
    """Those of plain torch, as under the newest Triton: every operation at one length."""
    chosen = "((257 or odd) and dtype1) or 257-8-4 or (misaligned and source1)"
    command = [*PYTEST, "tests/kernels/test_agreement.py", "-k", chosen]
    assert re.search(r"\b[1-9]\d+ passed", run_under(oldest, *command, interpret="1"))


@pytest.mark.timeout(3600)
def test_every_pair_of_settings_on_every_target(oldest: Path) -> None:
    """Some 500 kernels, which take ten minutes."""
    assert " 0 wrong" in run_under(oldest, "-m", "zeropp_kernels.aot", interpret="0")


@pytest.mark.timeout(3600)
def test_all_that_the_interpreter_runs(oldest: Path) -> None:
    """At every length, and what the operations are asked besides; three minutes."""
    files = [f"tests/kernels/test_{name}.py" for name in ("agreement", "ops", "properties", "statement", "table")]
    assert " passed" in run_under(oldest, *PYTEST, *files, interpret="1")
