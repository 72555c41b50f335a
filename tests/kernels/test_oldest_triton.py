"""The kernels under the oldest Triton that the package allows: machine code within its budgets, and equal bits.

The other tests run under the newest Triton. These tests install the oldest one into a folder that stands first on the
path of new processes, so they use the same torch and numpy as the other tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes for Linux only")

pytestmark = pytest.mark.campaign  # installing it and starting processes takes half a minute
ROOT = Path(__file__).resolve().parents[2]

# An empty -m also runs tests marked campaign, because each call selects tests by name.
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]


def declared() -> str:
    """Return the oldest Triton version that pyproject.toml allows."""
    found = re.search(r'"triton>=(\d+\.\d+)', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return f"{found.group(1)}.0"


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose subfolder "site" has the oldest Triton and no other package."""
    folder = tmp_path_factory.mktemp("triton")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder / "site")]
    done = subprocess.run([*install, f"triton=={declared()}"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"pip cannot get triton=={declared()}: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return folder


def run_under(folder: Path, *arguments: str, interpret: str) -> str:
    """Run Python with the oldest Triton in ``folder`` first on its path, and return its output."""
    path = os.pathsep.join([str(folder / "site"), *(entry for entry in sys.path if entry)])
    own = {"TRITON_INTERPRET": interpret, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache")}
    # The inner pytest must not read the variables that the outer pytest sets for itself.
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
    """Compile only the kernels that quantize; a campaign test compiles every kernel for every target."""
    command = ["-m", "zeropp_kernels.aot", "--cover", "each", "--targets", "sm_90", "--only", "quantize"]
    assert " 0 wrong" in run_under(oldest, *command, interpret="0")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", ["agree", "events"])
def test_prepared_launches(oldest: Path, rows: str) -> None:
    """Prepared launches pass the arguments that Triton would pass, and are not repeated where Triton must launch."""
    assert " 0 wrong" in run_under(oldest, "-m", "tests.kernels.prepared", rows, interpret="0")


@pytest.mark.timeout(600)
def test_bits_under_the_interpreter(oldest: Path) -> None:
    """Under the interpreter, results of every operation equal the plain reference's at one length."""
    chosen = "((257 or odd) and dtype1) or 257-8-4 or (misaligned and source1)"
    command = [*PYTEST, "tests/kernels/test_agreement.py", "-k", chosen]
    assert re.search(r"\b[1-9]\d+ passed", run_under(oldest, *command, interpret="1"))


@pytest.mark.timeout(3600)
def test_every_pair_of_settings_on_every_target(oldest: Path) -> None:
    """Compiles about 500 kernels, which takes ten minutes."""
    assert " 0 wrong" in run_under(oldest, "-m", "zeropp_kernels.aot", interpret="0")


@pytest.mark.timeout(3600)
def test_all_that_the_interpreter_runs(oldest: Path) -> None:
    """Runs the agreement tests at every length and the other interpreter tests, which takes three minutes."""
    files = [f"tests/kernels/test_{name}.py" for name in ("agreement", "ops", "properties", "statement", "table")]
    assert " passed" in run_under(oldest, *PYTEST, *files, interpret="1")
