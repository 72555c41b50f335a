"""The program of one rank of ``bench.checkpoint``: saves the same amount of data in each way."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

import zeropp
from zeropp import checkpoint
from zeropp.checkpoint.files import view_of

WIDTH = 2048
_BLOCK = 8 << 20


def resident(kind: str = "RssAnon") -> int:
    """Return the memory of this process in bytes: anonymous memory, or another kind of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) << 10
    return 0


class Peak:
    """Context that measures the largest growth of this process's memory in bytes, sampled every 5 ms."""

    def __enter__(self) -> Peak:
        self.most, self._before, self._stop = 0, resident(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            self.most = max(self.most, resident() - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def nothing() -> None:
    """Do nothing: the ``wait`` of ways that are complete when their call returns."""


def layers(mebibytes: int) -> int:
    """Return the number of layers of 16 MiB (float32) whose weights and two states fill ``mebibytes`` on each rank."""
    return max(mebibytes * dist.get_world_size() // (3 * 16), 1)


def build(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def step(model: nn.Module, optimizer: Any) -> None:
    loss = model(torch.randn(4, WIDTH)).square().mean()
    optimizer.backward(loss) if isinstance(optimizer, zeropp.ZeroOptimizer) else loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def write_raw(path: Path, nbytes: int) -> None:
    """Write as fast as the disk allows: ``nbytes`` in 8 MiB blocks, without the page cache, by four threads, synced."""
    room = torch.randint(0, 256, (_BLOCK + 4096,), dtype=torch.uint8)
    begin = -room.data_ptr() % 4096
    memory = view_of(room[begin : begin + _BLOCK])
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    blocks = iter(range(nbytes // _BLOCK))
    os.posix_fallocate(descriptor, 0, nbytes // _BLOCK * _BLOCK)

    def work() -> None:
        for number in blocks:
            os.pwrite(descriptor, memory, number * _BLOCK)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.fsync(descriptor)
    os.close(descriptor)


class Bench:
    """Measures the ways of saving in turns."""

    def __init__(self, folder: Path, mebibytes: int, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.count = layers(mebibytes)
        self.rows: list[dict[str, Any]] = []
        self.nbytes = 3 * 4 * WIDTH * WIDTH * self.count // dist.get_world_size()

    def timed(self, way: str, turn: int, save: Callable[[Path], None], wait: Callable[[], None]) -> dict[str, Any]:
        path = self.folder / way.replace(" ", "-")
        dist.barrier()
        with Peak() as peak:
            start = time.perf_counter()
            save(path)
            blocked = time.perf_counter() - start
            wait()
            dist.barrier()
            done = time.perf_counter() - start
        figures = torch.tensor([blocked, done, peak.most / 2**20], dtype=torch.float64)
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        blocked, done, most = figures.tolist()
        rate = self.nbytes * dist.get_world_size() / done / 1e9
        row = {"way": way, "round": turn, "blocked": blocked, "done": done, "rate": rate, "peak": most}
        row["warm"] = turn % self.rounds > 0
        self.rows.append(row)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            for each in self.folder.glob(f"{path.name}*.raw"):
                each.unlink()
            os.sync()
        dist.barrier()
        return row

    def run(self) -> None:
        """Measure zeropp's ways first, then those of FSDP2; each system's memory is freed before the other is built."""
        self.ours()
        gc.collect()
        self.peers()

    def ours(self) -> None:
        """Measure zeropp's ways, raw writes, and a copy in memory."""
        model = build(self.count)
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), model, config)
        step(model, optimizer)
        source, target = (torch.zeros(self.nbytes // 4) for _ in range(2))

        def at_once(path: Path) -> None:
            checkpoint.save(path, model, optimizer)

        def asynchronously(path: Path) -> None:
            checkpoint.save(path, model, optimizer, asynchronous=True)

        for turn in range(self.rounds):
            self.timed("disk", turn, self.write_raw, nothing)
            self.timed("zeropp", turn, at_once, nothing)
            copy = self.copy(source, target)
            row = self.timed("zeropp asynchronous", turn, asynchronously, checkpoint.wait)
            row["copy"] = copy
        optimizer.close()

    def write_raw(self, path: Path) -> None:
        """Write as many bytes as this rank saves in the other ways."""
        write_raw(path.with_name(f"{path.name}-{dist.get_rank()}.raw"), self.nbytes)

    def copy(self, source: Tensor, target: Tensor) -> float:
        """Return the seconds of a copy by one thread into memory that was used before, on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        target.copy_(source)
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def peers(self) -> None:
        """Measure the ways of FSDP2."""
        model = build(self.count)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step(model, optimizer)
        rank, flat = dist.get_rank(), StateDictOptions(flatten_optimizer_state_dict=True)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)

        def by_dcp(path: Path) -> None:
            weights, states = get_state_dict(model, optimizer, options=flat)
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)

        def by_torch(path: Path) -> None:
            found = get_state_dict(model, optimizer, options=whole)
            if rank == 0:
                path.mkdir()
                with (path / "file.pt").open("wb") as file:
                    torch.save(found, file)
                    file.flush()
                    os.fsync(file.fileno())

        for turn in range(self.rounds):
            self.timed("disk", self.rounds + turn, self.write_raw, nothing)
            for way, save in (("FSDP2, dcp.save", by_dcp), ("FSDP2, torch.save of whole states", by_torch)):
                self.timed(way, self.rounds + turn, save, nothing)


def main(folder: str, mebibytes: str, rounds: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    bench = Bench(Path(folder), int(mebibytes), int(rounds))
    bench.run()
    if dist.get_rank() == 0:
        (Path(folder) / "result.json").write_text(json.dumps(bench.rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
