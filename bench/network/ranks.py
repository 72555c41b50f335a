"""The program of each rank: all systems take turns, at one link rate after another.

``python -m bench.network`` starts the program on every node. Rank 0 writes the results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import zeropp
from bench.common import congestion
from bench.common.contestant import Contestant, meet
from bench.common.flags import add_model_flags
from bench.network.links import cut_into_frames, sent_bytes, set_rate
from bench.network.measured import BASE
from bench.step_time.systems import build
from examples.gpt import GPT, GPTConfig
from examples.text_data import Batches, load_text

_TRIES = 4  # attempts to find the rate of waiting_rate()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--systems", "--rates", "--equal", "--dtype", "--reduce-dtype", "--result"):
        parser.add_argument(name, required=True)
    for name in ("steps", "rounds", "warm-up"):
        parser.add_argument(f"--{name}", type=int, required=True)
    add_model_flags(parser)
    parser.add_argument("--node-size", dest="local", type=int, required=True)
    return parser.parse_args()


def first_on_node() -> bool:
    """Return True if this rank changes settings that all ranks of its node share, such as the link's rate."""
    return int(os.environ["LOCAL_RANK"]) == 0


class Race:
    """All systems, and the link that they share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        device = torch.device("cpu")
        batches = Batches(
            load_text().train, args.batch, args.seq_len, dist.get_rank(), dist.get_world_size(), args.seed
        )
        self.contestants = [build(name, args, device, batches) for name in args.systems.split(",") if name]
        self.rows: list[dict] = []

    def turn(self, contestant: Contestant, steps: int) -> tuple[float, float]:
        """Return seconds and bytes that the first node sent to other nodes, per step; the same on every rank.

        An unmeasured step comes first. The measurement lasts from the end of that step to the end of the last one,
        because communication left in flight by a step is hidden by the forward of the next step.
        """
        meet(torch.device("cpu"))
        contestant.one_step()
        sent, start = sent_bytes(), time.perf_counter()
        for _ in range(steps):
            contestant.one_step()
        found = torch.tensor([time.perf_counter() - start, float(sent_bytes() - sent)], dtype=torch.float64) / steps
        contestant.settle()
        meet(torch.device("cpu"))
        dist.broadcast(found, 0)
        seconds, nbytes = found.tolist()
        return seconds, nbytes

    def sent_in(self, contestant: Contestant, steps: int) -> int:
        """Return the bytes that this node sends to other nodes in some steps, including all that is left in flight."""
        meet(torch.device("cpu"))
        sent = sent_bytes()
        meet(torch.device("cpu"))
        for _ in range(steps):
            contestant.one_step()
        contestant.settle()
        meet(torch.device("cpu"))
        return sent_bytes() - sent

    def limit(self, rate: float | None) -> None:
        """Limit the rate at which every node sends, in million bits per second; None for no limit. Collective."""
        if first_on_node():
            set_rate(rate)
        meet(torch.device("cpu"))

    def run(self, kind: str, rate: float | None) -> None:
        """Measure all systems at one rate: in each round, one turn per system."""
        self.limit(rate)
        for number in range(self.args.rounds):
            for contestant in self.contestants:
                seconds, sent = self.turn(contestant, self.args.steps)
                row = {"kind": kind, "rate": rate, "round": number, "system": contestant.name}
                self.rows.append({**row, "s": seconds, "bytes": sent})

    def run_equal(self, contestant: Contestant, sent: float) -> None:
        """Measure one system at the rate at which its bytes per step take as long as its step without a limit.

        Each turn at that rate has a turn without a limit beside it, because the load of the machine changes over
        minutes.
        """
        rate = round(sent * 8e-6 / self.free(contestant.name), 2)
        for number in range(self.args.rounds):
            row = {"kind": "equal", "rate": rate, "round": number, "system": contestant.name}
            self.limit(None)
            row["free"], _ = self.turn(contestant, self.args.steps)
            self.limit(rate)
            row["s"], _ = self.turn(contestant, self.args.steps)
            self.rows.append({**row, "link": sent * 8e-6 / rate})

    def free(self, name: str) -> float:
        """Return the median seconds per step of a system without a limit."""
        return statistics.median(r["s"] for r in self.rows if (r["kind"], r["system"]) == ("free", name))

    def waiting_rate(self, share: float, sent: float) -> float:
        """Return the rate at which the base system waits for ``share`` of its step, in million bits per second.

        The target is step = free / (1 - share), with free = the step without a limit. The search starts from the
        assumption step = 0.7 * free + link time: 30 % of the unlimited step overlaps with communication.

        Args:
            share: part of the step, between 0 and 1.
            sent: bytes per step that the system sends from the first node.
        """
        base = next(each for each in self.contestants if each.name == BASE)
        free = self.free(BASE)
        target = free / (1 - share)
        rate = sent * 8e-6 / (target - 0.7 * free)
        for _ in range(_TRIES):
            self.limit(rate)
            seconds, _ = self.turn(base, self.args.steps)
            if abs(seconds / target - 1) < 0.04:
                break
            rate *= (seconds - 0.7 * free) / (target - 0.7 * free)
        return round(rate, 2)


def ledger_of(contestant: Contestant) -> dict | None:
    """Return the bytes between nodes that this rank's ledger has counted, by kind and codec; None without a ledger."""
    if not contestant.name.startswith("zeropp"):
        return None
    report = zeropp.comm_report(contestant.model)
    found = {f"{row.kind} {row.codec}": 0 for row in report.rows if row.link == "cross"}
    for row in report.rows:
        if row.link == "cross":
            found[f"{row.kind} {row.codec}"] += row.bytes
    return found


def counted(race: Race, contestant: Contestant, steps: int) -> dict:
    """Return the bytes per step of the first node: counted by its device, and by the ledgers of its ranks if any."""
    before = ledger_of(contestant)
    sent = race.sent_in(contestant, steps) / steps
    after = ledger_of(contestant)
    if before is None or after is None:
        return {"ledger": None, "device": sent}
    tables: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(tables, {key: value - before.get(key, 0) for key, value in after.items()})
    ledger = {key: sum(table[key] for table in tables[: race.args.local]) / steps for key in tables[0]}
    return {"ledger": ledger, "device": sent}


def count(race: Race, steps: int) -> dict[str, dict]:
    """Return the bytes of :func:`counted` for each system, without a rate limit and with all frame headers."""
    if first_on_node():
        cut_into_frames(True)
    found = {contestant.name: counted(race, contestant, steps) for contestant in race.contestants}
    if first_on_node():
        cut_into_frames(False)
    return found


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    race = Race(args)
    for contestant in race.contestants:  # warm up: the first steps learn the order, compile and allocate
        race.sent_in(contestant, args.warm_up)
    race.run("free", None)
    bytes_by_codec = count(race, steps=2)
    found: dict[str, float] = {}
    for rate in args.rates.split(","):
        if rate.startswith("wait"):
            found[rate] = race.waiting_rate(float(rate.removeprefix("wait")) / 100, bytes_by_codec[BASE]["device"])
            race.run(rate, found[rate])
        elif rate != "none":
            race.run("rate", float(rate))
    for contestant in race.contestants:
        if contestant.name in args.equal.split(","):
            race.run_equal(contestant, bytes_by_codec[contestant.name]["device"])
    race.limit(None)
    losses = {contestant.name: contestant.measured()["losses"] for contestant in race.contestants}
    if rank == 0:
        with torch.device("meta"):
            model = GPT(GPTConfig(args.vocab, args.layers, args.d_model, args.heads, args.seq_len))
        measured = {"rows": race.rows, "losses": losses, "counted": bytes_by_codec, "found": found}
        measured["tcp"] = congestion.in_force()
        measured["numel"] = sum(p.numel() for p in model.parameters())
        Path(args.result).write_text(json.dumps(measured))
    meet(torch.device("cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
