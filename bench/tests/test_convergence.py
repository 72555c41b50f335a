"""bench/convergence runs, continues interrupted runs with the same bits, and computes correct statistics."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.convergence import __main__ as convergence
from bench.convergence import report
from bench.convergence import run as convergence_run
from bench.convergence.arms import ARMS, SEEDS, Settings

ROOT = Path(__file__).resolve().parents[2]
TINY = replace(convergence.QUICK, steps=7, layers=1, d_model=32, sample=3, validate_every=3)


@pytest.mark.campaign
def test_quick_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--quick", f"--runs={tmp_path}"])
    convergence.main()
    shown = capsys.readouterr().out
    for arm in convergence.QUICK_ARMS:
        assert f"| {ARMS[arm].label} |" in shown
    runs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert len(runs) == 2 * len(convergence.QUICK_ARMS)
    assert not list(tmp_path.glob("*.pt"))
    error = {(each["arm"], each["seed"]): report.after_warmup(each, "all") for each in runs}
    for seed in SEEDS[:2]:
        assert error["plain", seed] < error["hadamard-loco", seed] < error["zeropp", seed]
    convergence.main()  # all runs have results, so this call runs none
    assert "8 of 8 runs are done" in capsys.readouterr().out


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("arm", "compute"), [("plain", "fp32"), ("hadamard-loco", "fp32"), ("delta4", "fp32"), ("loco-both", "bf16")]
)
def test_an_interrupted_run_ends_with_the_same_bits(
    arm: str, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(TINY, compute=compute)
    whole = convergence_run.run(arm, 11, settings, tmp_path / "whole", 100)
    step = convergence_run.Training.train_step

    def interrupted(self: Any) -> None:
        if self.step == 5:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(convergence_run.Training, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convergence_run.run(arm, 11, settings, tmp_path / "parts", 2)
    monkeypatch.setattr(convergence_run.Training, "train_step", step)
    assert [path.suffix for path in (tmp_path / "parts").iterdir()] == [".pt"]
    parts = convergence_run.run(arm, 11, settings, tmp_path / "parts", 2)
    assert parts.pop("seconds") != whole.pop("seconds")
    assert parts == whole


def test_seeds_are_paired_and_weights_of_lossless_messages_are_the_plain_ones() -> None:
    first, second = (convergence_run.Training(arm, 23, TINY) for arm in ("plain", "delta4"))
    other = convergence_run.Training("plain", 37, TINY)
    assert all(map(torch.equal, first.seen, second.seen))
    assert not all(map(torch.equal, first.seen, other.seen))
    assert all(map(torch.equal, first.batches[1].at(4), second.batches[1].at(4)))
    for training in (first, second, other):
        training.ranks.close()


def test_quantiles_of_student() -> None:
    """The integral of Student's density from 0 to the quantile must be 0.975 - 0.5."""
    for freedom, quantile in enumerate(report.T975, 1):
        x = torch.linspace(0.0, quantile, 200_001, dtype=torch.float64)
        density = (1 + x.square() / freedom) ** (-(freedom + 1) / 2)
        norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
        assert float(torch.trapezoid(density, x)) * math.exp(norm) == pytest.approx(0.475, abs=1e-4)


def test_intervals_and_verdicts() -> None:
    found = report.interval([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert report.verdict(found) == "not separable"
    assert report.verdict(report.interval([0.1, 1.1])) == "not separable"
    assert report.verdict(report.interval([1.0, 1.01, 1.02])) == "worse"
    assert report.verdict(report.interval([-1.0, -1.01, -1.02])) == "better"
    with pytest.raises(ValueError, match="1 values"):
        report.interval([1.0])


def fake(arm: str, seed: int, final: float) -> dict[str, Any]:
    series = [0.5, 0.1, 0.1]
    return {
        "arm": arm, "seed": seed, "settings": {**TINY.__dict__, "warmup": 3}, "numel": 1000, "final": final,
        "gradient_bits": {"local": 8.0, "cross": 4.0}, "seconds": 1.0, "torch": "t", "step": [3, 6, 7],
        "loss": series, "single": series, "weight_bits": series, "validation": [],
        **dict.fromkeys(convergence_run.CLASSES, series),
    }  # fmt: skip


def test_unpaired_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="different seeds"):
        report.by_arm([fake("plain", 1, 2.0), fake("plain", 2, 2.0), fake("zeropp", 1, 2.0)])
    other = fake("zeropp", 1, 2.0)
    other["settings"]["steps"] = 8
    with pytest.raises(ValueError, match="different settings"):
        report.by_arm([fake("plain", 1, 2.0), other])


def test_page_plot_and_numbers_are_saved(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "convergence.md", tmp_path / "docs")
    runs = [fake(arm, seed, 2.0 + 0.1 * (arm == "loco") + 0.01 * seed) for arm in ARMS for seed in (1, 2, 3)]
    for name in ("", "other"):
        for path in report.save(runs, tmp_path, name):
            assert path.stat().st_size > 0
    page = (tmp_path / "docs" / "convergence.md").read_text()
    assert page.count(report.FIRST) == page.count(report.LAST) == 1
    assert "| ZeRO++, LoCo cross | 0.10 |" in page and "worse" in page
    assert "above plain | the interval contains 0, or within 0.3 % | NOT MET |" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--arms=plane", "unknown"),
        ("--seeds=1", "2 to 5"),
        ("--seeds=0", "2 to 5"),
        ("--jobs=0", "at least 1"),
        ("--steps=0", "at least 1"),
        ("--batch=0", "at least 1"),
        ("--lr=-1", "more than 0"),
        ("--steps=100", "more than --warmup 100"),
        ("--windows=7", "at least 8"),
        ("--heads=5", "a multiple of --heads 5"),
        ("--device=nope", "expected cpu"),
        ("--compute=fp8", "expected fp32"),
    ],
)
def test_wrong_arguments(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convergence.parse_arguments([words])
    assert message in capsys.readouterr().err


def test_names_of_runs_tell_settings_and_arms_apart() -> None:
    settings = Settings()
    assert settings.stem("loco", 11) == Settings().stem("loco", 11)
    assert len({settings.stem("loco", 11), replace(settings, lr=2e-3).stem("loco", 11)}) == 2
