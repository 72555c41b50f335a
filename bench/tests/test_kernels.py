"""The kernel benchmarks run, compare equal work, and report their results."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common.machine import machine
from bench.kernels import launch, report
from bench.kernels.operations import OPERATIONS, Operation
from tests.kernels.operations import NAMES

NUMEL = 6144


class TorchFunctions(TorchDispatchMode):
    """Dispatch mode that records the names of zeropp's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        space, name = function._schema.name.split("::")
        if space == "zeropp":
            self.names.add(name)
        return function(*args, **(kwargs or {}))


BY_NAME = {operation.name: operation for operation in OPERATIONS}


@pytest.mark.parametrize("name", BY_NAME)
def test_by_hand_gives_the_same_bits(name: str) -> None:
    twin = BY_NAME[name].make(NUMEL, "cpu")
    for _ in range(2):  # twice, because error feedback and references change with each call
        ours = twin.ours()
        if twin.by_hand is None:
            assert name.startswith(("copy", "lossless")), "an operation that needs an eager version has none"
            continue
        for left, right in zip(ours, twin.by_hand(), strict=True):
            assert torch.equal(left, right.view(left.shape))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_bytes_are_of_a_plausible_size(operation: Operation) -> None:
    """Between 2.5 and 12 bytes per value in total, and proportional to the number of values."""
    each = operation.nbytes(1 << 24) / (1 << 24)
    assert 2.5 <= each <= 12 and math.isclose(each, operation.nbytes(1 << 26) / (1 << 26), rel_tol=1e-3)


def test_every_operation_is_timed() -> None:
    timed = set()
    for operation in OPERATIONS:
        twin = operation.make(NUMEL, "cpu")
        with TorchFunctions() as seen:
            twin.ours()
        timed |= seen.names
    assert timed >= set(NAMES)


def test_host_time_by_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each operation is timed once per column and round. Then the operations run their kernels again."""
    pytest.importorskip("triton", reason="Triton comes for Linux only")
    ran = []
    monkeypatch.setattr(launch, "microseconds", lambda device, run, calls: ran.append(run) or 1.5)
    monkeypatch.setattr("sys.argv", ["launch.py", "--rounds", "2", "--json", str(tmp_path / "found.json")])
    launch.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(ran) == 2 * 4 * len(found) and {*BY_NAME, "scatter of 100 tensors"} < found.keys()
    assert all(times == {"call": 1.5, "torch": 1.5, "general": 1.5, "prepared": 1.5} for times in found.values())
    assert f"Triton {machine('cpu')['triton']}" in capsys.readouterr().out.splitlines()[0]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, run in launch.many(device, 3).items():
        outputs = run()
        for output in outputs:
            output.fill_(77)
        with launch.idle_card(launch.WAYS["torch"]):
            run()
        assert all((output == 77).all() for output in outputs), f"{name} ran its kernel"
        run()
        assert not any((output == 77).all() for output in outputs)


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    row = {
        "operation": "copy", "contender": "zeropp_kernels", "mebibytes": 16, "seconds": 1e-3, "target": 92,
        "gigabytes_per_second": 33.5, "percent_of_copy": 100.0, "device": "a card", "torch": "2.13.0",
    }  # fmt: skip
    other = {**row, "operation": "quantize int8", "gigabytes_per_second": 16.75, "percent_of_copy": 50.0}
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"benchmarks": [{"extra_info": row}, {"extra_info": other}, {"extra_info": {}}]}))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["report.py", str(file), "--save", "made-up"])
    report.main()
    said = capsys.readouterr().out
    assert "| quantize int8 | zeropp_kernels | 16 | 1000 | 16.75 | 50 | 92 |" in said
    assert f"Triton {machine('cpu')['triton']}" in said.splitlines()[0]
    saved = sorted(path.suffix for path in tmp_path.glob("*made-up.*"))
    assert saved == [".json", ".md", ".png"]
