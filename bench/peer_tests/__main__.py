"""``python -m bench.peer_tests``: run the tests, compare the outcomes, and check the list of reasons."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.common import results
from bench.common.machine import machine
from bench.peer_tests import reasons, report
from bench.peer_tests.environment import Environment, run_file
from bench.peer_tests.outcomes import Outcome, file_of, passed

FOLDERS = ("unit/runtime/zero", "unit/runtime/half_precision", "unit/checkpoint")
FILES = "unit/runtime/test_ds_config_*.py"
LEAST = 0.75
STAND_IN = ("-m", "zeropp.compat.deepspeed")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peer_tests", description="Compare DeepSpeed's own tests.")
    parser.add_argument("--source", type=Path, help="checkout of DeepSpeed's repository; without it nothing is run")
    parser.add_argument("--peer", metavar="PYTHON", help="Python of an environment with DeepSpeed")
    parser.add_argument("--recorded", type=Path, metavar="JSON", help="file that --save wrote; replaces --peer")
    parser.add_argument(
        "--ours", metavar="PYTHON", default=sys.executable, help="Python of an environment with zeropp; default: this"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="FILE", help="files below SOURCE/tests, such as unit/checkpoint/test_sparse.py"
    )
    parser.add_argument("--folder", type=Path, help="folder for records and logs; a used one continues where it ended")
    parser.add_argument("--ranks", type=int, default=2, help="tests with more ranks are skipped in both environments")
    parser.add_argument("--seconds", type=float, default=90.0, help="time limit of one test")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/<date>_<NAME>.md and .json")
    args = parser.parse_args(argv)
    if args.source is not None and not (args.source / "tests" / "unit" / "common.py").is_file():
        parser.error(f"--source {args.source} has no tests/unit/common.py: give the root of a checkout of DeepSpeed")
    if args.source is not None and (args.peer is None) == (args.recorded is None):
        parser.error("give either --peer or --recorded: one of them says which tests pass under DeepSpeed")
    return args


def files_of(tests: Path) -> list[str]:
    """Return all test files of the comparison, relative to ``tests``."""
    found = [path for folder in FOLDERS for path in (tests / folder).rglob("test_*.py")]
    return sorted(str(path.relative_to(tests)) for path in [*found, *tests.glob(FILES)])


def commit_of(source: Path) -> str:
    """Return hash and date of the checkout's commit."""
    asked = subprocess.run(["git", "-C", source, "log", "-1", "--format=%h of %cs"], capture_output=True, text=True)
    return asked.stdout.strip() or "unknown: no git repository"


def run_all(
    environment: Environment, tests: Path, files: list[str], folder: Path, wanted: set[str] | None = None
) -> dict[str, Outcome]:
    """Return test id -> outcome, for all tests of the files, or only for the wanted tests."""
    found: dict[str, Outcome] = {}
    listed = None if wanted is None else folder / "wanted.json"
    if listed is not None and wanted is not None:
        listed.write_text(json.dumps(sorted(wanted)))
        files = [file for file in files if any(file_of(name) == file for name in wanted)]
    for file in files:
        outcomes = run_file(environment, tests, file, folder, listed)
        print(f"{environment.name}: {file}: {len(passed(outcomes))} of {len(outcomes)} pass", flush=True)
        found |= outcomes
    return found


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return versions, commit, and the outcomes in both environments, as values for JSON."""
    tests = folder / "tests"
    shutil.copytree(args.source / "tests", tests, dirs_exist_ok=True)
    files = args.only or files_of(tests)
    ours = Environment("here", args.ours, STAND_IN, args.ranks, args.seconds)
    found: dict[str, Any] = {"commit": commit_of(args.source), "files": files, "here_versions": ours.versions(folder)}
    if args.peer is not None:
        peer = Environment("DeepSpeed", args.peer, (), args.ranks, args.seconds)
        found["there_versions"] = peer.versions(folder)
        found["there"] = _plain(run_all(peer, tests, files, folder))
    else:
        recorded = json.loads(args.recorded.read_text())
        found["there_versions"] = recorded["there_versions"]
        found["there"] = {name: why for name, why in recorded["there"].items() if file_of(name) in files}
    # Tests that fail or are skipped under DeepSpeed are not run under the stand-in: they give no information about it.
    wanted = {name for name, outcome in found["there"].items() if outcome["outcome"] == "passed"}
    found["here"] = _plain(run_all(ours, tests, files, folder, wanted))
    return found


def _plain(outcomes: dict[str, Outcome]) -> dict[str, dict[str, str]]:
    # Keep one line of each error, which is enough to classify it; the folder has the whole texts.
    return {name: {**asdict(outcome), "why": report.last_line(outcome.why)} for name, outcome in outcomes.items()}


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; return 0 if it agrees with the list of reasons, else 1."""
    args = parse_arguments(argv)
    if args.source is None:
        print("SKIPPED: DeepSpeed's tests need --source, a checkout of its repository; its package has no tests")
        return 0
    listed = reasons.load()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(args, folder.resolve())
    there, here = ({name: Outcome(**each) for name, each in found[side].items()} for side in ("there", "here"))
    expected = passed(there)
    wrong = reasons.problems(listed, expected, passed(here), LEAST)
    both = len(expected & passed(here))
    body = "\n\n".join([
        f"Tests of commit {found['commit']}; DeepSpeed {found['there_versions']['deepspeed']}, torch "
        f"{found['there_versions']['torch']}, {args.ranks} CPU ranks. Of {len(expected)} tests that pass under "
        f"DeepSpeed, {both} ({both / max(len(expected), 1):.1%}) pass here.",
        report.table(there, here),
        "Not here, though there:",
        "\n".join(f"- {line}" for line in report.missed(there, here)),
    ])  # fmt: skip
    about = machine("cpu")
    # Placeholders, as in the package's docstring, because the real paths only exist on this machine.
    given = ["--peer", "PEER/bin/python"] if args.peer else ["--recorded", "RECORDED.json"]
    words = ["--source", "SOURCE", *given, "--ours", "OURS/bin/python"]
    text = results.page("DeepSpeed's own tests", "bench.peer_tests", words, about, body)
    print(text)
    if args.save:
        results.save({"machine": about, **found}, text, args.save)
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
