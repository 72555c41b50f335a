"""The kernel benchmarks run, compare equal work, and report their results."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common.machine import machine, memory_bandwidth
from bench.gpu import __main__ as gpu
from bench.gpu import kernels
from bench.gpu.part import Outcome, State
from bench.kernels import launch, operations, peers, report
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


class Quantizer:
    """A stand-in for DeepSpeed's CUDA extension, with one code per byte. ``ran`` has its calls: name, bits, group."""

    __name__ = "quantizer"
    Symmetric = "symmetric"

    def __init__(self) -> None:
        self.ran: list[tuple[str, int, int]] = []

    def quantize(self, x: Tensor, groups: int, bits: int, way: str) -> list[Tensor]:
        assert way == self.Symmetric and x.dtype is torch.float16
        self.ran.append(("quantize", bits, x.numel() // groups))
        scales = x.float().abs().amax(1, keepdim=True).clamp_min(1e-6) / (2 ** (bits - 1) - 1)
        return [(x / scales).round().to(torch.int8), scales]

    def dequantize(self, codes: Tensor, scales: Tensor, groups: int, bits: int, way: str) -> Tensor:
        assert way == self.Symmetric and len(scales) == groups
        self.ran.append(("dequantize", bits, codes.numel() // groups))
        return (codes * scales).half()


class OlderQuantizer(Quantizer):
    """A stand-in for an extension with LoCo."""

    def loco_swizzle_quant(
        self, x: Tensor, error: Tensor, beta: float, groups: int, bits: int, way: str, *parts: int
    ) -> list[Tensor]:
        assert error.shape == x.shape and beta == operations.BETA and parts == (1, 1, 1)
        before = len(self.ran)
        codes, scales = self.quantize(x + error, groups, bits, way)
        error.copy_(error * beta + (x + error - codes * scales) * (1 - beta))
        self.ran[before:] = [("loco", bits, x.numel() // groups)]
        return [codes, scales]


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Quantizer:
    """An extension with LoCo, and DeepSpeed as if it were installed."""
    made = OlderQuantizer()
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    monkeypatch.setattr(peers, "quantizer", lambda: made)
    monkeypatch.setattr(peers, "values", lambda numel, device, *more: operations.values(numel, "cpu", *more))
    return made


@pytest.mark.parametrize("name", [name for name, by in peers.PEERS if by == "DeepSpeed"])
def test_peers_deepspeed(name: str, extension: Quantizer) -> None:
    codec = peers.CODECS["DeepSpeed"](name, NUMEL, "cuda")
    assert codec.is_right()
    run = peers.run_of(name, codec)
    extension.ran.clear()
    assert name in BY_NAME and len(run()) == (1 if name.startswith("dequantize") else 2)
    assert (
        extension.ran
        == {
            "quantize int8": [("quantize", 8, 256)],
            "quantize int4": [("quantize", 4, 128)],
            "dequantize int8": [("dequantize", 8, 256)],
            "dequantize int4": [("dequantize", 4, 128)],
            "feedback + int4": [("dequantize", 8, 128), ("loco", 4, 128), ("quantize", 8, 128)],
        }[name]
    )
    other = peers.Codec(codec.bits, codec.x, codec.encode, lambda codes, scales: 1.5 * codec.decode(codes, scales))
    assert not other.is_right()


def test_peers_are_skipped_with_a_reason(extension: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(name: str, by: str, device: str) -> str:
        with pytest.raises(pytest.skip.Exception) as skipped:
            peers.CODECS[by](name, NUMEL, device)
        return str(skipped.value)

    assert "needs CUDA" in reason("quantize int8", "DeepSpeed", "cpu")
    monkeypatch.setattr(peers, "quantizer", Quantizer)
    assert "quantizer has no loco_swizzle_quant" in reason("feedback + int4", "DeepSpeed", "cuda")
    monkeypatch.setattr(peers, "quantizer", lambda: OSError("no nvcc"))
    assert "cannot be built: no nvcc" in reason("quantize int8", "DeepSpeed", "cuda")
    primitives = "torchao.quantization.quant_primitives"
    for name in ("torchao", "torchao.quantization", primitives):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__name__=name, MappingType=0, quantize_affine=0))
    lacking = "has no choose_qparams_affine, dequantize_affine"
    assert reason("quantize int8", "torchao", "cpu").endswith(lacking)
    for name in ("deepspeed", primitives):
        monkeypatch.setitem(sys.modules, name, None)
    assert reason("quantize int8", "DeepSpeed", "cuda") == "deepspeed is not installed"
    assert reason("quantize int8", "torchao", "cuda") == "torchao is not installed"


@pytest.mark.parametrize(
    ("card", "bandwidth"),
    [
        ("NVIDIA H200", 4800),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("A100-SXM4-80GB", 2039),
        ("AMD Instinct MI300X", 5300),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("one CPU core", None),
    ],
)
def test_memory_bandwidth(card: str, bandwidth: float | None) -> None:
    assert memory_bandwidth(card) == bandwidth


def measurement(operation: str, percent: float | None, mebibytes: int = 256, **more: object) -> dict:
    """Return a row of ``test_kernels.py``, on a card whose copies reach 4000 GB/s."""
    return {
        "operation": operation, "contender": "zeropp_kernels", "mebibytes": mebibytes, "seconds": 1e-3, "target": 92,
        "gigabytes_per_second": 40.0 * (percent or 60.0), "percent_of_copy": percent, "device": "NVIDIA H200",
        "torch": "2.13.0", **more,
    }  # fmt: skip


ROWS = [
    measurement("copy", 100.0),
    measurement("quantize int8", 50.0),
    measurement("quantize int8", 91.0, 64),
    measurement("quantize int8", 40.0, contender="DeepSpeed"),
    measurement("dequantize int8", 93.0),
    measurement("dequantize int8", None, 1),
]


def saved(folder: Path, measured: dict, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that ``--save made-up`` writes for one result file."""
    file = folder / "measured.json"
    file.write_text(json.dumps(measured))
    monkeypatch.setattr(report, "RESULTS", folder)
    monkeypatch.setattr("sys.argv", ["report.py", str(file), "--save", "made-up"])
    report.main()
    return sorted(path.name.partition("made-up")[2] for path in folder.glob("*made-up*"))


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    measured = {"benchmarks": [*({"extra_info": row} for row in ROWS), {"extra_info": {}}]}
    assert saved(tmp_path, measured, monkeypatch) == ["-shares.png", ".json", ".md", ".png"]
    said = capsys.readouterr().out
    assert "| quantize int8 | zeropp_kernels | 256 | 1000 | 2000.00 | 50 | 42 | 92 |" in said
    assert "| dequantize int8 | zeropp_kernels | 1 | 1000 | 2400.00 | - | 50 | 92 |" in said
    assert f"Triton {machine('cpu')['triton']}" in said.splitlines()[0]
    (tmp_path / "alone").mkdir()
    assert "-shares.png" not in saved(tmp_path / "alone", {"benchmarks": [{"extra_info": ROWS[0]}]}, monkeypatch)
    assert report.percents({**ROWS[0], "device": "another card"}) == {"% of copy": "100", "% of data sheet": "-"}


def test_report_of_a_part_of_the_gpu_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file that ``bench/gpu.sh kernels`` writes has the measured rows, beside others."""
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    others = [{"operation": "copy", "by": "host time of a call", "us": "3.0"}]
    steps = {
        "256 MiB": Outcome(State.MEASURED, [kernels._row(row) for row in ROWS]),
        "host time": Outcome(State.MEASURED, others),
    }
    about = {**machine("cpu"), "card": "NVIDIA H200", "driver": "1", "processor": "another processor"}
    given = gpu.parse_arguments(["kernels", "--dry-run", f"--keep={tmp_path}", f"--results={tmp_path}"])
    _, file = gpu.save(given, kernels.PART, "", about, steps)
    measured = json.loads(file.read_text())
    read = report.rows_of(measured)
    targets = {"zeropp_kernels": 92, "DeepSpeed": 0}
    assert read == [
        {name: value for name, value in {**row, "target": targets[row["contender"]]}.items() if name != "torch"}
        for row in ROWS
    ]
    assert "-shares.png" in saved(tmp_path, measured, monkeypatch)
    assert "another processor" in capsys.readouterr().out.splitlines()[0]


def test_cells_of_the_shares() -> None:
    assert report.cells(ROWS) == {
        ("quantize int8", 256): (50.0, True),
        ("quantize int8", 64): (91.0, False),  # targets are for larger sizes
        ("dequantize int8", 256): (93.0, False),
    }
    assert report.cells([measurement("quantize int8", 50.0, device="one CPU core")]) == {
        ("quantize int8", 256): (50.0, False)
    }
