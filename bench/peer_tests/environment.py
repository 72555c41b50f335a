"""An environment, and the run of one file of tests in it."""

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
# Under pytest 8.4 and later, classes are no fixtures, and tests that need them fail under DeepSpeed, too.
_NEWEST_PYTEST = (8, 4)
# Seconds that pytest may take until its first test begins; and by which a test may be late.
STARTING, LATE = 300.0, 30.0
_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR")


@dataclass(frozen=True)
class Environment:
    """Where tests run."""

    name: str
    """For files and reports."""
    python: str
    """Its interpreter."""
    before: tuple[str, ...] = ()
    """What runs the interpreter, if not it is run itself: that which puts the stand-in on its path."""
    ranks: int = 2
    """How many devices a CPU says it has; tests of more ranks are skipped."""
    seconds: float = 90.0
    """That one test may take."""
    modules: tuple[str, ...] = field(default=("torch", "numpy", "pytest", "deepspeed", "peer_removed"))
    """Imported once for all tests of a file: each test starts processes of its own."""

    def command(self, *arguments: str) -> list[str]:
        before = [self.python, *self.before] if self.before else []
        return [*before, self.python, *arguments]

    def variables(self) -> dict[str, str]:
        """Environment variables: what both have to agree on, and nothing else of this process."""
        kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        # Compilers and ninja of an environment are beside its interpreter.
        kept["PATH"] = os.pathsep.join([str(Path(self.python).parent), kept.get("PATH", os.defpath)])
        return kept | {
            "DS_ACCELERATOR": "cpu",
            "DS_UNITTEST_TIMEOUT": str(int(self.seconds)),
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "LOCAL_SIZE": str(self.ranks),
            "OMP_NUM_THREADS": "1",
            # Plugins that happen to be installed may reorder or repeat tests.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PEER_PRELOAD": " ".join(self.modules),
            "PYTHONPATH": str(_INSIDE),
        }

    def versions(self, folder: Path) -> dict[str, str]:
        """Versions of what tests depend on, asked in ``folder``.

        Raises:
            SystemExit: it lacks something, or its pytest is too new.
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
    """Test id -> outcome, of one file.

    A test that hangs ends pytest, which is then started for the others: where a rank fails by what is no Exception to
    its pool, as pytest's own failures are, the pool waits for ever, and so may pytest when it closes the pool.

    Args:
        environment: where.
        tests: the copied folder ``tests``.
        file: below it.
        folder: for records and logs.
        wanted: a JSON list of the tests to run; None for all.
    """
    name = f"{environment.name}-{file.replace('/', '.')}"
    record = folder / f"{name}.jsonl"
    # Its directories of its own: those of other runs of pytest make room for each other.
    options = ("-q", "-p", "peer_record", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}")
    command = environment.command("-m", "pytest", file, *options)
    built = folder / "extensions"
    variables = environment.variables() | {"PEER_RECORD": str(record), "TORCH_EXTENSIONS_DIR": str(built)}
    if wanted is not None:
        variables["PEER_WANTED"] = str(wanted)
    hung, before = 0, -1
    while hung > before:
        # Of a build that ended with its test: whoever builds next would wait for it, without end.
        for lock in built.glob("**/lock"):
            lock.unlink()
        with (folder / f"{name}.log").open("a") as log:
            _run(command, tests, variables, log.fileno(), record, environment.seconds + LATE)
        before, hung = hung, sum(outcome.outcome == "timeout" for outcome in outcomes.read(record).values())
    return outcomes.read(record)


def _run(command: Sequence[str], cwd: Path, variables: dict[str, str], log: int, record: Path, still: float) -> None:
    """Run until it ends, or for ``still`` seconds has recorded nothing; whatever it started has ended with it."""
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
        # Ranks of a test that hung have outlived the test.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _size(record: Path) -> int:
    return record.stat().st_size if record.exists() else 0
