"""Checks by pytest: results of kernels bit for bit, delayed streams, hops over NCCL, and the engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from bench.gpu.part import Ended, Outcome, Part, State, Step, last_words
from bench.gpu.scale import Scale

__all__ = ["PART", "check", "tests_step"]

_CHECKS: dict[str, tuple[list[str], float]] = {
    "kernels": (["tests/kernels/test_agreement.py", "tests/kernels/test_table.py", "tests/kernels/test_gpu.py"], 240.0),
    "streams": (["tests/gpu/test_delayed_streams.py"], 90.0),
    "hops": (["tests/gpu/test_size_one_group.py"], 90.0),
    "engine": (["tests/gpu/test_engine.py", "tests/gpu/test_staged_backend.py"], 150.0),
    "large": (["tests/kernels/test_large.py"], 90.0),
}
"""Name of a step -> its test files and its time limit in seconds."""
_TEST_SECONDS = 100  # time limit of one test


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def steps(scale: Scale) -> list[Step]:
    """Return the steps of the part; each is one call of pytest."""
    return [check(scale, name, chosen) for name, chosen in scale.chosen.items()]


def check(scale: Scale, name: str, chosen: Sequence[str]) -> Step:
    """Return the step ``name`` with its test files; ``chosen`` are pytest arguments that select tests."""
    files, seconds = _CHECKS[name]
    return tests_step(scale, name, files, chosen, seconds, scale.workers if name == "kernels" else 0)


def tests_step(
    scale: Scale, name: str, files: Sequence[str], chosen: Sequence[str], seconds: float, workers: int = 0
) -> Step:
    """Return a step that runs pytest. When it is started again, it skips tests that have passed (`bench.gpu.outcomes`).

    Args:
        scale: sizes of the run.
        name: name of the step.
        files: test files.
        chosen: arguments of pytest that select tests.
        seconds: time limit.
        workers: number of worker processes of pytest-xdist; 0 for none.
    """
    # Clear the project's own options, which need plugins that a GPU machine may lack.
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["-p", "bench.gpu.outcomes", "--outcomes={folder}/outcomes", *chosen, *files]
    if workers and _has("xdist"):
        command += ["-n", str(workers)]
    if _has("pytest_timeout"):
        command += [f"--timeout={_TEST_SECONDS}"]
    return Step(name, command, seconds, partial(_read, name, workers, scale.dry))


def _read(name: str, workers: int, dry: bool, ended: Ended) -> Outcome:
    """Return the outcome with the numbers of tests passed, failed and skipped, over all starts of the step."""
    path = ended.folder / "outcomes"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    last = {line["test"]: line for line in lines}
    counts = Counter(line["outcome"] for line in last.values())
    notes = sorted({line["reason"] for line in last.values() if line["reason"]})
    if workers and not _has("xdist"):
        notes.append(f"pytest-xdist is not installed: one process in place of {workers}")
    row = {
        "check": name,
        **{outcome: str(counts[outcome]) for outcome in ("passed", "failed", "skipped")},
        "seconds": f"{sum(line['seconds'] for line in last.values()):.1f}",
        "note": "; ".join(notes) or "-",
    }
    failed = [test for test, line in last.items() if line["outcome"] == "failed"]
    if failed:
        return Outcome(State.WRONG, [row], f"{failed[0]} and {len(failed) - 1} more; {last_words(ended, 12)}")
    if ended.code is None:
        return Outcome(State.UNFINISHED, [row], "time ran out; what has passed is not run again")
    # Exit code 5 means that pytest had no test to run, because all have passed at an earlier start.
    if ended.code not in (0, 5) or not (counts["passed"] or (dry and counts["skipped"])):
        return Outcome(State.WRONG, [row], f"no test has passed; {last_words(ended)}")
    return Outcome(State.MEASURED, [row])


PART = Part(
    "bits",
    "Bits on one card",
    ["check", "passed", "failed", "skipped", "seconds", "note"],
    steps,
    notes=(
        "Kernels: the bits of plain torch, for every operation, dtype and awkward length. Streams: the bits of a run "
        "without delays, with sleeping kernels at the start of streams' work and of computing, and other bits where a "
        "wait is left out. Hops: the identity over NCCL with one rank, and an engine made to take them. Engine: plain "
        "torch in float64, no waiting host, memory as planned; two and four ranks that share the card. Large: offsets "
        "beyond 2^31. Seconds are those of all tests together, whichever start ran them.",
    ),
    needs=("pytest", "pydantic"),
)
