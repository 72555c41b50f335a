"""Figures in README.md equal the figures in the tables that it links to."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from bench.network.measured import Measured

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_figures_have_tables() -> None:
    """Each link to a table leads to an existing file."""
    found = re.findall(r"bench/results/[\w./-]+", TEXT)
    assert found and all((ROOT / name).is_file() for name in found), textwrap.shorten(str(found), 300)


def said(pattern: str) -> list[float]:
    """Return the numbers in the only sentence of README.md that matches ``pattern``."""
    (found,) = re.findall(pattern, TEXT)
    return [float(each) for each in (found if isinstance(found, tuple) else (found,))]


def test_figures_of_the_slow_link_are_those_of_its_table() -> None:
    table = json.loads((ROOT / "bench/results/2026-11-27_network-two-nodes-batch-16.json").read_text())
    found = Measured(table, table["settings"])
    sent = {name: row["device"] / found.unit for name, row in table["counted"].items()}
    least, plain = sorted((sent["zeropp_delta4"], sent["zeropp_pp"])), sent["zeropp_s3"]
    low, high = said(r"\*\*([\d.]+) to ([\d.]+) times fewer bytes")
    assert [low, high] == [round(plain / nbytes, 1) for nbytes in reversed(least)]
    assert said(r"sends ([\d.]+) \(ZeRO\+\+\) or ([\d.]+) \(`delta4`\) of U,") == [
        round(each, 2) for each in reversed(least)
    ]
    assert said(r"\s([\d.]+)\s+in our stage 3\.") == [round(plain, 2)]
    assert said(r"; ([\d.]+) of U\): call") == [round(sent["fsdp2_pp"], 2)]
    (free, _), (kind, rate) = found.kinds
    codecs = ("zeropp_pp", "zeropp_pp_loco", "zeropp_delta4", "zeropp_lossless")
    faster, slower = (
        [found.speed(*where, name) / found.speed(*where, "zeropp_s3") for name in codecs]
        for where in ((kind, rate), (free, None))
    )
    assert said(r"\*\*([\d.]+) to ([\d.]+) times the tokens") == [round(min(faster), 1), round(max(faster), 1)]
    assert said(r"steps are (\d+) to (\d+) % longer") == [
        round(100 / each - 100) for each in (max(slower), min(slower))
    ]
    assert said(r"throttled \((\d+) Mbit/s\)") == [round(rate)]


def test_figures_of_the_card_are_those_of_its_table() -> None:
    text = (ROOT / "bench/results/2026-11-27_gpu-first-run.md").read_text()

    def row(name: str) -> list[float]:
        """Return the numbers in the first table's row of this name; the first table is that of 1.34 B parameters."""
        found = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", text, re.MULTILINE)
        return [float(cell) for cell in re.findall(r"\d+\.?\d*", found[0].replace("(later run 191.7)", ""))]

    ours, fsdp2, deepspeed = (row(name) for name in ("zeropp", "FSDP2", "DeepSpeed 0.19.8, stage 3"))
    steps = said(r": ([\d.]+) x FSDP2's step time, ([\d.]+) x DeepSpeed's, ([\d.]+) x FSDP2's peak")
    assert steps == [round(ours[0] / fsdp2[0], 2), round(ours[0] / deepspeed[0], 2), round(ours[4] / fsdp2[4], 2)]
    assert round(ours[0] / row("plain torch")[0], 2) == 1.0
    offloaded = row("zeropp, `offload_optimizer` on the CPU")[0] / row("FSDP2, `CPUOffloadPolicy`")[0]
    assert said(r"on H200 to host memory, ([\d.]+) x") == [round(offloaded, 2)]
