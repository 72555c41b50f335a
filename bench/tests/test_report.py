"""A sum's report (squared norm, non-finite flag) equals torch's results, made by kernels or by a separate pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeropp.wire import codecs
from zeropp.wire.codecs import BlockCodec, PlainCodec, Report, report_nbytes, total_of

NUMEL = 5 * 256


def shard(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def square(report: Report) -> float:
    return total_of([report], torch.device("cpu"))[0].item()


def bad(report: Report, values: Tensor) -> float:
    report.measure_flag(values)
    return total_of([report], torch.device("cpu"))[1].item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pass_of_its_own(dtype: torch.dtype) -> None:
    values = shard(dtype)
    report = Report(values)
    assert report.nbytes == report_nbytes(NUMEL, dtype) == 5 * dtype.itemsize + 4
    report.measure(values)
    assert square(report) == pytest.approx(values.double().square().sum().item(), rel=1e-7) and bad(report, values) == 0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_value_that_is_not_finite(value: float) -> None:
    values = shard()
    values[700] = value
    report = Report(values)
    report.measure(values)
    assert bad(report, values) == 1 and not torch.tensor(square(report)).isfinite()
    values[700] = 1.0
    report.measure(values)
    assert bad(report, values) == 0, "what was found before is forgotten"


def test_squares_that_pass_float32_are_no_sign_of_infinite_values() -> None:
    values = torch.full((NUMEL,), 1e30)
    report = Report(values)
    report.measure(values)
    assert square(report) == float("inf") and bad(report, values) == 0


def test_several_shards_of_two_dtypes_and_none() -> None:
    reports = []
    for seed, dtype in enumerate([torch.float32, torch.float64, torch.float32]):
        reports.append(Report(values := shard(dtype, seed)))
        reports[-1].measure(values)
    total = total_of(reports, torch.device("cpu"))
    assert total[0].item() == pytest.approx(sum(square(report) for report in reports), rel=1e-12)
    assert total_of([], torch.device("cpu")).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("codec", [PlainCodec(torch.bfloat16), PlainCodec(torch.float32), BlockCodec(8)], ids=str)
def test_reports_of_kernels_equal_those_of_a_separate_pass(
    codec: PlainCodec | BlockCodec, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' reference stands in for a GPU; sum and report must equal those of a separate pass over the shard."""
    buffer = codec.empty(NUMEL, 3, torch.device("cpu"))
    for seed, message in enumerate(buffer.view(3, -1).unbind()):
        codec.encode_(message, shard(seed=seed))
    sums, reports = [], []
    for fused in (False, True):
        monkeypatch.setattr(codecs, "summed_by_kernels", lambda out, fused=fused: fused)
        sums.append(shard(seed=9))
        reports.append(Report(sums[-1]))
        rows = buffer.view(3, -1)
        messages = rows if fused else list(rows.unbind())  # NCCL gives one tensor, gloo one tensor per rank
        codec.decode_sum_(messages, sums[-1], scale=0.25, accumulate=accumulate, report=reports[-1])
        assert bad(reports[-1], sums[-1]) == 0
    assert torch.equal(*sums)
    assert square(reports[0]) == pytest.approx(square(reports[1]), rel=1e-6)
    assert square(reports[1]) == pytest.approx(sums[0].double().square().sum().item(), rel=1e-6)


def test_messages_that_lie_apart_are_summed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "summed_by_kernels", lambda out: True)
    messages = [shard(seed=seed) for seed in range(3)]
    report = Report(out := torch.empty(NUMEL))
    PlainCodec(torch.float32).decode_sum_(messages, out, report=report)
    assert torch.equal(out, messages[0] + messages[1] + messages[2])
    assert square(report) == pytest.approx(out.double().square().sum().item(), rel=1e-6)
