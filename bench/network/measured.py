"""``Measured``: the results of the ranks, accessible by rate and system."""

from __future__ import annotations

import statistics

__all__ = ["BASE", "Measured", "rate_name"]

BASE = "zeropp_s3"  # "wait80" is the rate at which this system waits for 80 % of its step


class Measured:
    """Results of one run, by rate and system."""

    def __init__(self, found: dict, settings: dict) -> None:
        self.found = found
        self.settings = settings
        nodes = settings["nodes"]
        self.unit = 2 * found["numel"] * (nodes - 1) / nodes  # M (n-1)/n, with M = bytes of the weights in bf16
        self.tokens = nodes * settings["local"] * settings["batch"] * settings["seq_len"]
        self.kinds = dict.fromkeys((r["kind"], r["rate"]) for r in found["rows"] if r["kind"] != "equal")

    def values(self, key: str, kind: str, rate: float | None, system: str) -> list[float]:
        return [r[key] for r in self.found["rows"] if (r["kind"], r["rate"], r["system"]) == (kind, rate, system)]

    def step(self, kind: str, rate: float | None, system: str) -> float:
        return statistics.median(self.values("s", kind, rate, system))

    def speed(self, kind: str, rate: float | None, system: str) -> float:
        """Return the tokens per second of all ranks together."""
        return self.micro_batches(system) * self.tokens / self.step(kind, rate, system)

    def micro_batches(self, system: str) -> int:
        return int(system.partition("_x")[2] or 1)

    def systems(self, kind: str, rate: float | None) -> list[str]:
        return list(dict.fromkeys(r["system"] for r in self.found["rows"] if (r["kind"], r["rate"]) == (kind, rate)))


def rate_name(kind: str, rate: float | None, base: str = BASE) -> str:
    """Return the title of a rate; ``base`` is the displayed name of the system that defines rates like "wait80"."""
    if rate is None:
        return "no limit"
    share = f", where {base} waits {kind.removeprefix('wait')} % of its step" if kind.startswith("wait") else ""
    return f"{rate:g} Mbit/s{share}"
