"""bench/common/congestion.py chooses the documented congestion control, and a refusal by the kernel raises no error."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.common import congestion

# (names that the kernel allows, current congestion control, expected choice)
CHOICES = [
    (["reno", "cubic", "bbr"], "bbr", "cubic"),
    (["reno", "cubic"], "cubic", "cubic"),
    (["reno", "bbr"], "bbr", "reno"),
    (["reno"], "reno", "reno"),
    (["bbr", "dctcp"], "dctcp", "dctcp"),
    (["cubic_like", "renovated"], "bbr", "bbr"),
    ([], "bbr", "bbr"),
    ([], "unknown", "unknown"),
]


@pytest.mark.parametrize(("names", "default", "wanted"), CHOICES)
def test_cubic_else_reno_else_the_default(names: list[str], default: str, wanted: str) -> None:
    assert congestion.choice(names, default) == wanted


def test_a_kernel_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "_SETTINGS", tmp_path / "not there")
    assert congestion.allowed() == [] and congestion.in_force() == "unknown"
    congestion.settle()
    with pytest.raises(RuntimeError, match="stays unknown instead of reno; allowed: none by name"):
        congestion.settle("reno")


def test_the_chosen_congestion_control_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "_SETTINGS", tmp_path)
    (tmp_path / "tcp_allowed_congestion_control").write_text("reno bbr\n")
    (tmp_path / "tcp_congestion_control").write_text("bbr\n")
    congestion.settle()
    assert congestion.in_force() == "reno"
    congestion.settle("bbr")
    assert congestion.in_force() == "bbr"


def test_a_refused_choice_leaves_the_setting_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel has a congestion control of this name, so the kernel refuses it."""
    before = congestion.in_force()
    monkeypatch.setattr(congestion, "choice", lambda names, default: "nonesuch")
    congestion.settle()
    assert congestion.in_force() == before
    with pytest.raises(RuntimeError, match=f"stays {before} instead of nonesuch; allowed: "):
        congestion.settle("nonesuch")
