"""Steps as processes with a time limit, whose outcomes are kept for a part that is started again."""

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
_ENDING = 3.0  # seconds for a process to end by itself
_LEAST = 5.0  # seconds under which starting a step makes no sense


def digest(about: Sequence[str]) -> str:
    """Stands for the sources that results come from, and for what they are ``about``: machine, versions, sizes."""
    found = hashlib.sha256("\n".join(about).encode())
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


class Runner:
    """Steps of one part.

    Args:
        folder: where results are kept.
        key: of :func:`digest`; results of another are not used again.
        until: when the part's time is up, in seconds of ``time.monotonic``.
        environment: variables of every step, whatever it says itself.
    """

    def __init__(self, folder: Path, key: str, until: float, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder / key
        self.environment = environment or {}
        self.until = until
        self._running: set[subprocess.Popen[bytes]] = set()

    def outcomes(self, steps: Sequence[Step]) -> list[tuple[Outcome, bool]]:
        """Outcomes of steps that run at the same time, as :meth:`outcome` returns them."""
        if len(steps) == 1:
            return [self.outcome(steps[0])]
        with ThreadPoolExecutor(len(steps)) as pool:
            try:
                return list(pool.map(self.outcome, steps))
            except BaseException:  # SystemExit among them, from the handler of a signal: no thread waits on
                for process in list(self._running):
                    _end(process)
                raise

    def outcome(self, step: Step) -> tuple[Outcome, bool]:
        """The outcome of a step, and True if it was kept from an earlier start."""
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
        """Exit code of a step's process; None if it was ended because its time was up."""
        command = [word.replace("{folder}", str(place)) for word in step.command]
        with (place / "log").open("w") as log:
            # A group of its own: its ranks and workers end with it.
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
    """This process's environment, without what pytest would go by: in a worker nothing is timed, and on a CI machine
    the summary has whole messages in place of a line a test, so that a log's last lines name none."""
    go_by = ("CI", "BUILD_NUMBER")
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_") and name not in go_by}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started, if any of them runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING)


def _write(path: Path, text: str) -> None:
    """All of it, or nothing: whoever is ended here leaves no half of a result."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
