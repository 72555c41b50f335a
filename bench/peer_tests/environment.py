"""An environment of the comparison, and the run of one test file in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peer_tests import outcomes
from bench.peer_tests.outcomes import Outcome

__all__ = ["Environment", "run_file"]

_INSIDE = Path(__file__).with_name("inside")
_ASK = """
import json, sys
import deepspeed, hjson, pytest, torch
found = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "pytest": pytest.__version__}
print(json.dumps(found), file=sys.stderr)
"""
# From pytest 8.4 on, a class cannot be a fixture, so tests that need this would also fail under DeepSpeed.
_NEWEST_PYTEST = (8, 4)
# STARTING: seconds until the first test must begin. LATE: seconds that a test may exceed its time limit.
STARTING, LATE = 300.0, 30.0
_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")


@dataclass(frozen=True)
class Environment:
    """A Python environment in which tests run."""

    name: str
    """Name in file names and reports."""
    python: str
    """Path of the Python interpreter."""
    before: tuple[str, ...] = ()
    """Arguments of a first interpreter that starts the second one with the stand-in on its path; empty for none."""
    ranks: int = 2
    """Number of devices that the accelerator reports on a CPU; tests with more ranks are skipped."""
    seconds: float = 90.0
    """Time limit of one test."""
    modules: tuple[str, ...] = field(default=("torch", "numpy", "pytest", "deepspeed", "peer_removed"))
    """Modules that are imported once per test file, before each test starts its processes."""

    def command(self, *arguments: str) -> list[str]:
        before = [self.python, *self.before] if self.before else []
        return [*before, self.python, *arguments]

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a run: a fixed set, with a few of this process's variables."""
        kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        # An environment's compilers and ninja lie beside its interpreter.
        kept["PATH"] = os.pathsep.join([str(Path(self.python).parent), kept.get("PATH", os.defpath)])
        return kept | {
            "DS_ACCELERATOR": "cpu",
            "DS_UNITTEST_TIMEOUT": str(int(self.seconds)),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "LOCAL_SIZE": str(self.ranks),
            "OMP_NUM_THREADS": "1",
            # Other installed plugins might reorder or repeat tests.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PEER_PRELOAD": " ".join(self.modules),
            "PYTHONPATH": str(_INSIDE),
        }

    def versions(self, folder: Path) -> dict[str, str]:
        """Return the versions of deepspeed, torch and pytest in the environment.

        Args:
            folder: working directory of the query.

        Raises:
            SystemExit: a package is missing, or pytest is too new.
        """
        asked = subprocess.run(
            self.command("-c", _ASK), cwd=folder, env=self.variables(), capture_output=True, text=True, timeout=300
        )
        if asked.returncode:
            raise SystemExit(f"{self.name}: {self.python} cannot run these tests:\n{asked.stderr}")
        found: dict[str, str] = json.loads(asked.stderr.splitlines()[-1])
        if tuple(int(part) for part in found["pytest"].split(".")[:2]) >= _NEWEST_PYTEST:
            raise SystemExit(f"{self.name}: pytest {found['pytest']} is too new for these tests; install 'pytest<8.4'")
        return found


def run_file(
    environment: Environment, tests: Path, file: str, folder: Path, wanted: Path | None = None
) -> dict[str, Outcome]:
    """Run one test file, and return test id -> outcome.

    pytest may hang together with a test: if a rank exits by an exception that is not an Exception, such as pytest's own
    failures, its process pool waits forever, and pytest waits for the pool. pytest is then killed and started again for
    the remaining tests.

    Args:
        environment: environment to run in.
        tests: copied folder ``tests``.
        file: path of the test file below ``tests``.
        folder: folder for records and logs.
        wanted: file with a JSON list of the tests to run; None for all.
    """
    name = f"{environment.name}-{file.replace('/', '.')}"
    record = folder / f"{name}.jsonl"
    # A basetemp of this run: in a shared one, pytest deletes the oldest folders of other runs.
    options = ("-q", "-p", "peer_record", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}")
    command = environment.command("-m", "pytest", file, *options)
    built = folder / "extensions"
    variables = environment.variables() | {"PEER_RECORD": str(record), "TORCH_EXTENSIONS_DIR": str(built)}
    if wanted is not None:
        variables["PEER_WANTED"] = str(wanted)
    hung, before = 0, -1
    while hung > before:
        # Remove lock files of extension builds that were killed; the next build would wait for them forever.
        for lock in built.glob("**/lock"):
            lock.unlink()
        with (folder / f"{name}.log").open("a") as log:
            _run(command, tests, variables, log.fileno(), record, environment.seconds + LATE)
        before, hung = hung, sum(outcome.outcome == "timeout" for outcome in outcomes.read(record).values())
    return outcomes.read(record)


def _run(command: Sequence[str], cwd: Path, variables: dict[str, str], log: int, record: Path, still: float) -> None:
    """Run a command until it ends or its record has not grown for ``still`` seconds; then kill all its processes."""
    process = subprocess.Popen(
        command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    size, until = _size(record), time.monotonic() + STARTING
    try:
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.2)
            before, size = size, _size(record)
            if size != before:
                until = time.monotonic() + still
    finally:
        # Kill the whole process group: ranks of a test that hung may still run.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _size(record: Path) -> int:
    return record.stat().st_size if record.exists() else 0
