"""The comparison with DeepSpeed's own tests: reading of records, check of reasons, and a run of one file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.peer_tests import __main__ as command
from bench.peer_tests import environment, outcomes, reasons, report
from bench.peer_tests.outcomes import Outcome
from bench.peer_tests.reasons import Reason

FILE = "unit/test_a.py"
THERE = {f"{FILE}::{name}" for name in ("one", "two[False]", "two[True]", "three")}


def problems(here: set[str], *listed: Reason, least: float = 0.0) -> list[str]:
    return reasons.problems(listed, THERE, {f"{FILE}::{name}" for name in here}, least)


def test_the_last_line_counts_and_a_failure_stays(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    lines = [
        *(("good", "started"), ("good", "passed"), ("skips", "started"), ("skips", "skipped")),
        *(("ends badly", "started"), ("ends badly", "passed"), ("ends badly", "failed")),
        *(("fails twice", "failed"), ("fails twice", "passed"), ("hangs", "started")),
    ]
    record.write_text("".join(json.dumps({"id": name, "outcome": outcome}) + "\n" for name, outcome in lines))
    found = {name: outcome.outcome for name, outcome in outcomes.read(record).items()}
    assert found == {
        "good": "passed", "skips": "skipped", "ends badly": "failed", "fails twice": "failed", "hangs": "timeout"
    }  # fmt: skip
    assert outcomes.read(tmp_path / "none") == {}


def test_a_failure_needs_a_reason() -> None:
    two = Reason(f"{FILE}::two[*", "private", "asserts _secret")
    assert problems({"one", "three", "two[False]", "two[True]"}) == []
    assert problems({"one", "three"}, two) == []
    assert problems({"one"}, two) == [f"{FILE}::three does not pass here, and has no reason"]
    assert len(problems(set())) == 4


def test_a_reason_needs_a_failure() -> None:
    two = Reason(f"{FILE}::two[*", "private", "asserts _secret")
    [said] = problems({"one", "three", "two[True]"}, two)
    assert said == f"{FILE}::two[* has a reason, but passes: {FILE}::two[True]"
    everything = {"one", "three", "two[False]", "two[True]"}
    [said] = problems(everything, Reason(f"{FILE}::four", "gpu", "compares with a card"))
    assert "no such test" in said
    assert problems(everything, Reason("unit/test_b.py::one", "gpu", "of a file that was not run")) == []


def test_three_of_four_have_to_pass() -> None:
    listed = [Reason(f"{FILE}::one", "bug", "1"), Reason(f"{FILE}::three", "bug", "2")]
    assert problems({"one", "two[False]", "two[True]"}, listed[1], least=0.75) == []
    [said] = problems({"two[False]", "two[True]"}, *listed, least=0.75)
    assert said.startswith("50.0%")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"tests": "a", "kind": "odd", "why": "b"}], "kind 'odd'"),
        ([{"tests": "a", "kind": "bug", "why": " "}], "with a why"),
        ([{"tests": "a", "kind": "bug", "why": "b"}] * 2, "two reasons for"),
    ],
)
def test_the_list_is_checked(entries: list[dict[str, str]], said: str, tmp_path: Path) -> None:
    path = tmp_path / "reasons.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=said):
        reasons.load(path)


def test_the_committed_list_can_be_read() -> None:
    assert all(reason.tests.startswith("unit/") for reason in reasons.load())


def test_the_report_counts_and_quotes() -> None:
    there = {name: Outcome("passed") for name in THERE}
    here = {FILE: Outcome("failed", "x\nE   ImportError: no /some/where/engine.py\nconftest.py:3: ImportError")}
    assert report.table(there, here).splitlines()[-1] == "| all | 4 | 0 | 0 | 0 | 0 | 1 | 0 | 0 | 0 |"
    assert report.missed(there, here)[0] == f"{FILE}::one: failed: ImportError: no engine.py"


TESTS = """
import os, pytest, time

def test_passes(): pass
def test_fails(): assert os.environ["LOCAL_SIZE"] == "none"
def test_ends_pytest(): pytest.exit("Test hanged", returncode=1)
def test_hangs(): time.sleep(60)
@pytest.mark.skip("of a card")
def test_skips(): pass
def test_after(): pass
def test_nobody_wants(): pass
"""
NAMES = ("passes", "fails", "ends_pytest", "hangs", "skips", "after")


def test_a_file_goes_on_after_one_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    monkeypatch.setattr(environment, "LATE", 0.0)
    here = environment.Environment("here", sys.executable, seconds=1.0, modules=())
    wanted = tmp_path / "wanted.json"
    wanted.write_text(json.dumps([f"test_it.py::test_{name}" for name in (*NAMES, "gone")]))
    found = environment.run_file(here, tmp_path, "test_it.py", tmp_path, wanted)
    assert {name.partition("::test_")[2]: outcome.outcome for name, outcome in found.items()} == {
        "passes": "passed", "fails": "failed", "ends_pytest": "timeout", "hangs": "timeout", "skips": "skipped",
        "after": "passed",
    }  # fmt: skip
    assert found["test_it.py::test_skips"].why == "Skipped: of a card"
    assert "AssertionError" in found["test_it.py::test_fails"].why


def test_without_a_checkout_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert "SKIPPED" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--source", "nowhere"])


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
def test_deepspeed_s_own_tests_pass_here_or_have_a_reason() -> None:
    needed = {"source": "ZEROPP_PEER_SOURCE", "peer": "ZEROPP_PEER_PYTHON", "ours": "ZEROPP_PEER_OURS"}
    given = {flag: os.environ[name] for flag, name in needed.items() if name in os.environ}
    if len(given) < len(needed):
        pytest.skip(
            f"{', '.join(needed.values())}: DeepSpeed's checkout and two interpreters, as bench.peer_tests says"
        )
    assert command.main([f"--{flag}={value}" for flag, value in given.items()]) == 0
