"""Progress bars appear on rank 0 for work that takes longer than a few seconds, if tqdm is installed."""

from __future__ import annotations

import contextlib
import importlib
import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.checkpoint_training import train, wrap
from tests.support.rank_pool import run_ranks
from zeropp import checkpoint
from zeropp.checkpoint import rank_sync as bars

pytest.importorskip("tqdm", reason="tqdm is not installed")


def tells(root: Path, seconds: float, **how: bool) -> dict[str, str]:
    """Return the output of each call to standard error.

    Args:
        root: folder for the files.
        seconds: seconds after which a bar appears.
        how: arguments of each call, such as ``progress=False``.
    """
    model, optimizer = wrap("stage 3")
    train(model, optimizer, range(1))
    found: dict[str, str] = {}

    def told(name: str, call: Any, *arguments: Any, **named: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()) as text:
            call(*arguments, **named, **how)
            checkpoint.wait()
        found[name] = text.getvalue()

    kept, bars.AFTER = bars.AFTER, seconds
    try:
        told("saving here", checkpoint.save, root / "here", model, optimizer)
        told("saving step-00000007", checkpoint.Series(root).save, 7, model, optimizer, asynchronous=True)
        told("loading here", checkpoint.load, root / "here", model, optimizer)
        told("exporting to out", checkpoint.export, root / "out", model)
        told("loading out", checkpoint.load_safetensors, model, root / "out")
        if dist.get_rank() == 0:
            told("writing whole", checkpoint.consolidate, root / "here", root / "whole")
    finally:
        bars.AFTER = kept
    # tqdm's monitor thread would never end.
    assert not [each for each in threading.enumerate() if "tqdm" in type(each).__name__.lower()]
    return found


def test_a_bar_on_the_first_rank(tmp_path: Path) -> None:
    """Every call that saves, loads or exports shows a bar that reaches 100 %."""
    first, second = run_ranks(2, tells, tmp_path, 0.0)
    for name, text in first.items():
        assert name in text and "100%" in text, (name, text)
    assert len(first) == 6 and set(second.values()) == {""}


@pytest.mark.campaign
def test_none_before_its_time_or_unless_wanted(tmp_path: Path) -> None:
    for seconds, how in ((1e9, {}), (0.0, {"progress": False})):
        first, _ = run_ranks(2, tells, tmp_path / str(seconds), seconds, **how)
        assert set(first.values()) == {""}


def test_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = importlib.import_module

    def without(module: str, *rest: Any) -> Any:
        if module == "tqdm":
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    monkeypatch.setattr(bars, "AFTER", 0.0)
    progress = bars.Progress("saving", True)
    progress.expect(2)
    progress.add(1)
    progress.add(1)
    progress.close()
    assert capsys.readouterr().err == ""
