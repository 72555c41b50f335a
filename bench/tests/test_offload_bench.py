"""The programs of bench/offload run, do not report unequal work, and print the values that their tables describe."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.common import results
from bench.offload import bus, cpu_step, disk, hidden, peers, peers_report, timeline

ROOT = Path(__file__).resolve().parents[2]


def made_up() -> dict[str, Any]:
    """Return invented results of four systems that do equal work."""
    system: dict[str, Any] = {
        "step_s": [1.0, 2.0, 4.0], "forward_s": [0.2, 0.4, 0.8], "backward_s": [0.3, 0.6, 1.2],
        "step_call_s": [0.5, 1.0, 2.0], "losses": [5.5, 5.0, 4.5], "norms": [4.0, 2.0, 0.5], "peak_bytes": 3 << 20,
        "building_bytes": 5 << 20, "disk_bytes": 7 << 20,
    }  # fmt: skip
    systems = {name: copy.deepcopy(system) for name in ("none", "cpu", "fsdp2", "deepspeed_cpu")}
    systems["cpu"] |= {"step_s": [0.6, 1.4, 2.2], "step_call_s": [0.1, 0.1, 0.1]}
    args = peers.parse_arguments(["--rounds=4", "--layers=1", "--d-model=8", "--heads=1"])
    settings = {name: getattr(args, name) for name in vars(args) if name != "folder"}
    return {"settings": settings, "systems": systems, "skipped": {"nvme": "there is no disk"}}


def rows(text: str) -> dict[str, list[str]]:
    return {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in text.splitlines() if "|" in line}


def test_ratios_and_visible_times_are_computed_by_round() -> None:
    """Forward and backward take 0.5, 1 and 2 s of steps of 0.6, 1.4 and 2.2 s, so medians of ratios differ by round."""
    found = made_up()
    table = peers_report.table(found)
    row = rows(table)["cpu"]
    assert row[1:5] == ["1.400", "0.600 (0.550, 0.700)", "0.100", "0.200"]
    parameters = peers_report.numel(found["settings"])
    assert row[5:9] == [f"{parameters / 0.2 / 1e6:.0f}", "3", "5", "7"]
    assert "nvme did not run: there is no disk." in table
    # The visible time is at least that of step(). If it is below the noise, there is no speed.
    found["systems"]["cpu"]["step_s"] = [0.4, 0.9, 2.0]
    assert rows(peers_report.table(found))["cpu"][4] == "0.100"
    found["systems"]["cpu"]["step_call_s"] = [0.001, 0.001, 0.001]
    assert rows(peers_report.table(found))["cpu"][4:6] == ["0.001", "-"]


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("cpu", "losses", [5.5, 5.0, 4.5 + 1e-9], "losses of cpu and none differ"),
        ("fsdp2", "losses", [5.5, 5.0, 4.51], "losses of fsdp2 and none differ"),
        ("deepspeed_cpu", "losses", [5.5, float("nan"), 4.5], "losses of deepspeed_cpu and none differ by nan"),
        ("fsdp2", "norms", [4.0, 2.1, 0.5], "norms of fsdp2 and none differ"),
    ],
)
def test_unequal_work_is_not_reported(name: str, key: str, value: object, words: str) -> None:
    found = made_up()
    assert peers_report.problems(found) == []
    found["systems"][name][key] = value
    (problem,) = peers_report.problems(found)
    assert problem.startswith(words)


def test_systems_that_clipped_nothing_are_not_reported() -> None:
    found = made_up()
    for name in found["systems"]:
        found["systems"][name]["norms"] = [0.9, 0.8, 0.7]
    assert [each.split(":")[0] for each in peers_report.problems(found)] == [
        f"{name} clipped nothing" for name in found["systems"]
    ]


@pytest.mark.campaign
def test_peers_run(tmp_path: Path) -> None:
    """Losses agree (bit for bit among zeropp systems). A job alone reports memory, and files hold all states."""
    script = (
        "import json, sys; from pathlib import Path; from bench.offload import peers, peers_report; "
        "args = peers.parse_arguments(sys.argv[1:]); found = peers.supervise(args); "
        "found['problems'] = peers_report.problems(found); args.systems, args.alone = ['nvme'], True; "
        "found['alone'] = peers.launch(args, Path(args.folder)); print(json.dumps(found))"
    )
    words = ["--layers=1", "--d-model=256", "--heads=2", "--seq-len=16", "--rounds=2", "--steps=1", "--no-memory"]
    words += ["--systems=none,cpu_part,nvme_all,fsdp2_cpu", f"--folder={tmp_path}"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, timeout=110, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == [] and list(found["systems"]) == ["none", "cpu_part", "nvme_all", "fsdp2_cpu"]
    for system in found["systems"].values():
        # One measured and one discarded round, each with a first step that is not measured.
        assert len(system["step_s"]) == 1 and len(system["losses"]) == 4 and len(system["norms"]) == 4
        assert 0 < system["forward_s"][0] < system["step_s"][0]
    parameters = peers_report.numel({"layers": 1, "d_model": 256, "heads": 2})
    # Main weights, gradients and two states, rounded up to pages.
    assert 0 <= found["alone"]["disk_bytes"] - 16 * parameters < 16 * 4096
    assert found["alone"]["peak_bytes"] > 0


def test_deepspeed_is_left_out_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [peers.why_not(name) for name in ("none", "deepspeed_cpu")] == [None, "DeepSpeed is not installed"]
    with pytest.raises(SystemExit, match=r"nothing can run here: .*DeepSpeed is not installed"):
        peers.supervise(peers.parse_arguments(["--systems=deepspeed_cpu"]))


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of saved results, in place of bench/results."""
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def only(saved: Path, suffix: str) -> Path:
    (found,) = saved.glob(f"*{suffix}")
    return found


def test_pipelined_tiles_beside_the_disk(tmp_path: Path, saved: Path) -> None:
    words = ["--numel=262144", "--tile=32768", "--block=65536", "--rounds=2", f"--folder={tmp_path}", "--save=a-disk"]
    disk.main([*words, "--compute=3"])
    text, found = only(saved, "_a-disk.md").read_text(), json.loads(only(saved, "_a-disk.json").read_text())
    assert f"python -m bench.offload.disk {' '.join(words)} --compute=3" in text
    assert "Kernels run 3 times, which stands for cores that are 3 times slower, on each tile" in text
    assert found["times"] == 3 and {way: len(own) for way, own in found["rounds"].items()} == dict.fromkeys(
        ("disk", "pipelined", "one tile at a time"), 2
    )
    # Kernels take a part of each step, and no time in the raw transfers.
    for way, pairs in found["rounds"].items():
        assert all((kernels == 0) if way == "disk" else (0 < kernels < whole) for whole, kernels in pairs)


def test_kernels_are_repeated_until_they_take_as_long_as_transfers() -> None:
    kernels = disk.Kernels()
    for whole, own, times in [(5.0, 1.0, 4), (5.0, 2.0, 6), (1.1, 1.0, 1), (1000.0, 1.0, disk.MOST)]:
        kernels.choose(whole, own)
        assert kernels.times == times


def test_kernels_run_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(disk, "step_slices", lambda *given: seen.append(given))
    kernels, given = disk.Kernels(), (object(), object(), [object()], [])
    kernels.times = 3
    kernels(*given)  # type: ignore[arg-type]
    assert seen == [given] * 3 and kernels.taken() > 0 and kernels.taken() == 0


def test_gain_is_computed_by_round_and_shown_beside_the_best_possible() -> None:
    args = disk.parse_arguments(["--rounds=3"])
    rounds = {
        disk.RAW: [(1.0, 0.0)] * 3,
        disk.PIPED: [(2.0, 1.0), (1.0, 1.0), (4.0, 1.0)],
        disk.PLAIN: [(3.0, 1.0), (2.0, 1.0), (4.4, 1.0)],
    }
    text = disk.report(args, rounds, 1)
    assert "they take 1.00 s, transfers 2.00 s" in text and "Kernels run once on each tile" in text
    assert "pipelined: 1.50 (1.10 to 2.00); 1.50 would be all of the shorter one hidden" in text


def test_hidden_and_cpu_step_are_saved(saved: Path) -> None:
    hidden.main(["--units=3", "--numel=4096", "--wait=1", "--rounds=2", "--save=hidden"])
    cpu_step.main(["--numel=4096", "--rounds=2", "--save=step"])
    found = json.loads(only(saved, "_hidden.json").read_text())
    assert found["figures"][hidden.EXPOSED] == pytest.approx(
        found["figures"]["lazy: step() and the next forward"] - found["figures"]["a forward with nothing to wait for"]
    )
    assert "within the bound: " in only(saved, "_hidden.md").read_text()
    assert len(json.loads(only(saved, "_step.json").read_text())["rows"]) == 6


def test_pictures_are_of_medians(saved: Path) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    from bench.offload.plot import hidden as draw_hidden
    from bench.offload.plot import peers as draw_peers

    left, right = draw_peers(made_up()).axes
    widths = [round(bar.get_width(), 6) for bar in left.patches]
    assert widths == [1.0, 1.2, 1.0, 1.0, 1.0, 0.2, 1.0, 1.0] and right.patches[0].get_width() == 3
    figures = {
        f"{way}: {what}": seconds
        for way, base in (("eager", 0.03), ("lazy", 0.02))
        for what, seconds in (("step() alone", base / 2), ("step() and the next forward", base))
    } | {"a forward with nothing to wait for": 0.01, hidden.ALLOWED: 0.005}
    (axis,) = draw_hidden({"figures": figures}).axes
    assert [round(bar.get_width(), 6) for bar in axis.patches] == [15, 10, 15, 10]
    assert [round(line.get_xdata()[0], 6) for line in axis.lines] == [10, 15]


def test_copies_over_the_bus_arrive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The program ends with an error if other values arrive than were sent."""
    monkeypatch.setattr(sys, "argv", ["bus", "--mebibytes=1"])
    bus.main()
    assert capsys.readouterr().out.count("GB/s") == 8


@pytest.mark.parametrize(
    ("parts", "gathers", "expected"),
    [
        # Cores: backward ends at 8, steps at 24, the last copy up at 27, its forward at 32.
        ((4, 2, 8, 3, 5), False, 32),
        # Bus down: the gradients arrive at 14 and 24, the step ends at 25, the copy up at 26, the forward at 27.
        ((4, 10, 1, 1, 1), False, 27),
        # Device: backward ends at 8, the gradient arrives at 9, the step ends at 10, the copy up at 11.
        ((4, 1, 1, 1, 20), False, 51),
        # Bus up: four copies in a period, or two.
        ((1, 1, 1, 9, 1), True, 36),
        ((1, 1, 1, 9, 1), False, 18),
    ],
)
def test_the_bound_of_a_timeline(parts: tuple[int, ...], gathers: bool, expected: int) -> None:
    assert timeline.bound(2, timeline.Parts(*parts), gathers=gathers) == expected


def test_a_timeline_has_the_order_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    few = ["--units=3", "--numel=3000", "--forward=3", "--backward=6", "--bus=0.01", "--step=0.002", "--rounds=2"]
    timeline.main([*few, "--save", "tiny"])
    (page,) = tmp_path.glob("*.md")
    assert "within 1.1 of the bound" in page.read_text()
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert set(found["figures"]) == set(timeline.WAYS)
    for way, expected in {"cpu": 1, "cpu, lazy_step false": 1, "cpu, offload_param": 2, "nvme": 1}.items():
        spans = found["ways"][way]["spans"]
        begins = {kind: [a for what, a, _ in spans if what == kind] for kind in ("backward", "step on host", "copy up")}
        called, returned, _ = found["ways"][way]["marks"]
        assert len(begins["backward"]) == len(begins["step on host"]) == 3, way
        assert max(begins["backward"]) < called < min(begins["step on host"]), "a step began before the norm was known"
        assert (max(begins["step on host"]) < returned) == (way == "cpu, lazy_step false")
        assert len(begins["copy up"]) == 3 * expected, way
        # Stated rates: 3000 float32 at 10 MB/s take 1.2 ms, and 3000 elements at 2 million per second 1.5 ms.
        figures = found["figures"][way]
        assert figures["copy down"] >= 3 * 0.0012 and figures["step on host"] >= 3 * 0.0015


def test_a_timeline_beyond_its_bound_says_so() -> None:
    row = dict.fromkeys(timeline.COLUMNS[1:], 1.0)
    text = timeline.report(
        {"cpu": row | {"period / bound": 1.11}, "nvme": row | {"bound": None, "period / bound": None}}
    )
    assert "cpu: within 1.1 of the bound: no." in text and "nvme: within" not in text
    assert "| nvme | 1000.0 | - | - |" in text
