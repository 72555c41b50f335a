"""``Runner``: runs steps as processes with a time limit, and stores outcomes for a part that is started again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from bench.gpu.part import Ended, Outcome, State, Step

__all__ = ["Runner", "digest"]

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("zeropp", "kernels", "bench", "tests/gpu", "tests/kernels", "tests/support", "examples")
_ENDING = 3.0  # seconds that a process gets to end by itself
_LEAST = 5.0  # smallest remaining time, in seconds, with which a step is started


def digest(about: Sequence[str]) -> str:
    """Return a hash of all sources and of ``about`` (machine, versions, sizes), for the reuse of stored results."""
    found = hashlib.sha256("\n".join(about).encode())
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


class Runner:
    """Runs the steps of one part.

    Args:
        folder: folder of stored results.
        key: result of :func:`digest`; results stored under another key are not used.
        until: end of the part's time, in seconds of ``time.monotonic``.
        environment: environment variables of all steps; they override the step's own.
    """

    def __init__(self, folder: Path, key: str, until: float, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder / key
        self.environment = environment or {}
        self.until = until
        self._running: set[subprocess.Popen[bytes]] = set()

    def outcomes(self, steps: Sequence[Step]) -> list[tuple[Outcome, bool]]:
        """Run steps at the same time, and return the result of :meth:`outcome` for each."""
        if len(steps) == 1:
            return [self.outcome(steps[0])]
        with ThreadPoolExecutor(len(steps)) as pool:
            try:
                return list(pool.map(self.outcome, steps))
            except BaseException:  # includes SystemExit of a signal handler: end the processes that threads wait for
                for process in list(self._running):
                    _end(process)
                raise

    def outcome(self, step: Step) -> tuple[Outcome, bool]:
        """Run a step; return its outcome, and True if the outcome was stored by an earlier start."""
        if step.lacks is not None:
            return Outcome(State.ABSENT, [], step.lacks), False
        place = self.folder / step.name.replace(" ", "-")
        kept = place / "outcome.json"
        if kept.exists():
            found = json.loads(kept.read_text())
            return Outcome(**{**found, "state": State(found["state"])}), True
        left = self.until - time.monotonic()
        if left < _LEAST:
            return Outcome(State.UNFINISHED, [], "no time was left for it"), False
        place.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        code = self._run(step, place, min(step.seconds, left))
        outcome = step.read(Ended(code, place / "log", place, time.monotonic() - begin))
        if outcome.state is State.MEASURED:
            _write(kept, json.dumps(asdict(outcome), indent=1))
        return outcome, False

    def _run(self, step: Step, place: Path, seconds: float) -> int | None:
        """Return the exit code of a step's process; None if it was killed at its time limit."""
        command = [word.replace("{folder}", str(place)) for word in step.command]
        with (place / "log").open("w") as log:
            # start_new_session=True makes a process group, so that the step's ranks and workers can be killed with it.
            process = subprocess.Popen(
                command, cwd=ROOT, env={**_surroundings(), **step.environment, **self.environment},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)
                self._running.discard(process)


def _surroundings() -> dict[str, str]:
    """Return this process's environment without variables that change pytest's output.

    In an xdist worker's environment, benchmarks are disabled. With CI's variables, the summary has full messages
    instead of one line per test, so the last lines of a log would not name the failed test.
    """
    go_by = ("CI", "BUILD_NUMBER")
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_") and name not in go_by}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all processes of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING)


def _write(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that a killed process leaves no incomplete result."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
