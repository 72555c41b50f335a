"""Several ranks over NCCL on one GPU: collectives, training compared with the staged backend, memory, lost ranks.

NCCL allows several ranks on one GPU from version 2.30 on, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set. torch's own NCCL is
older, so another library is preloaded: see ``bench/gpu.sh``. This module has the steps and the launcher of their ranks.
:mod:`bench.gpu.nccl_ranks` is the program of a rank.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import lzma
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.part import Ended, Outcome, Part, Row, State, Step, last_words
from bench.gpu.scale import CARD, DRY, Scale
from bench.step_time.launch import free_port

__all__ = ["CPU_BOUNDS", "LOADED", "ORDER_BOUNDS", "PART", "main", "note", "notes", "too_old", "version_of"]

LIBRARY = "NCCL_LIBRARY"
LOADED = "libnccl.so.2"  # the name under which torch or LD_PRELOAD has loaded the library
LEAST = (2, 30)
_REMEDY = (
    f"Set {LIBRARY} to the libnccl.so.2 of version {'.'.join(map(str, LEAST))} or later, as it is or as an .xz file; "
    "it is in the wheel nvidia-nccl-cu13, and the header of bench/gpu.sh says how to bring it"
)
GRACE = 5.0  # seconds allowed beyond hang_timeout, and for ranks to end after one has failed
_PLAIN = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
TRANSPORTS: Sequence[dict[str, str]] = (
    {},
    _PLAIN,
    {**_PLAIN, "NCCL_P2P_DISABLE": "1"},
    {**_PLAIN, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
)
"""Environment variables of NCCL's transports. The first that works is used: a container may forbid processes to share
the GPU's or the host's memory."""
ORDER_BOUNDS = {False: (2e-6, 1e-4), True: (1e-3, 0.1)}
"""True or False for bf16 -> bounds for results whose sums have another order: relative difference of losses, and
distance of final weights relative to their change in training.

On four CPU ranks, gloo's order and the order of ranks differ by 2.0e-7 and 8.9e-7 in float32, and by 1.2e-4 and 1.1e-2
in bf16. The bounds are at least eight times as large."""
CPU_BOUNDS = {False: (1e-5, 2e-3), True: (3e-3, 0.4)}
"""True or False for bf16 -> bounds as in ORDER_BOUNDS, between a GPU and a CPU.

On CPU ranks, a relative change of the initial weights by 1e-6 gives 2.9e-7 and 7.5e-5 in float32, and a change by 1e-3
gives 3.2e-4 and 0.12 in bf16. The bounds are at least three times as large."""
_TRANSPORT = "transport.json"
_NOTHING_QUEUED = "skipped on CPU, where launches run at once and no queue gets full"
_WIDTH = 300  # characters of a table cell
_SOON, _BLOCKED = 0.5, 1.0  # seconds: upper limit of a query, and lower limit of a launch that waits for the queue
_FOUND = "found"  # file with the ranks' results, one JSON object per line


def note(folder: Path, **what: Any) -> None:
    """Append one line to the file of the ranks' results."""
    with (folder / _FOUND).open("a") as file:
        file.write(json.dumps(what) + "\n")


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return the ranks' results in the order of their lines."""
    path = folder / _FOUND
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def too_old(version: tuple[int, ...] | None) -> str | None:
    """Return the reason why a version of NCCL cannot be used, with a remedy; None if it can, or on a CPU."""
    if version is None or version[:2] >= LEAST:
        return None
    return f"NCCL {'.'.join(map(str, version))} is in use, and takes one rank for each card. {_REMEDY}"


def unpacked(path: Path) -> Path:
    """Return the path of the library; an .xz file is unpacked beside itself first, unless that was done before."""
    whole = path.with_suffix("") if path.suffix == ".xz" else path
    if whole != path and (not whole.exists() or whole.stat().st_mtime < path.stat().st_mtime):
        partial_file = whole.with_suffix(".partial")
        with lzma.open(path) as packed, partial_file.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        partial_file.replace(whole)
    return whole.resolve()


def version_of(library: str) -> tuple[int, int, int]:
    """Return the version of a loaded NCCL library.

    ``torch.cuda.nccl.version()`` would return the version of the headers that torch was compiled with.

    Args:
        library: path, or name of a loaded library.

    Raises:
        OSError: the library does not exist or cannot be loaded.
    """
    number = ctypes.c_int()
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(number))
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def surroundings(dry: bool) -> tuple[dict[str, str], str | None]:
    """Return environment variables for ranks, and the reason why ranks cannot run; None if they can."""
    given = os.environ.get(LIBRARY)
    if dry:
        return {}, None
    try:
        library = str(unpacked(Path(given))) if given else LOADED
        lacks = too_old(version_of(library))
    except (OSError, lzma.LZMAError, AttributeError) as error:
        return {}, f"{f'{LIBRARY}={given}' if given else 'the NCCL of torch'} cannot be loaded: {error}. {_REMEDY}"
    found = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
    return found | ({"LD_PRELOAD": library} if given else {}), lacks


def steps(scale: Scale) -> list[Step]:
    """Return the steps in the order of the plan, with one step per way to lose a rank."""
    environment, lacks = surroundings(scale.dry)
    found = []

    def add(name: str, program: str, ranks: int, seconds: float, read: Callable[[Ended], Outcome], *names: str) -> None:
        command = [sys.executable, "-m", "bench.gpu.nccl", "{folder}", program, str(ranks), *names]
        command += ["--dry-run"] * scale.dry
        # The launch queue test has one rank and needs no NCCL.
        why = (_NOTHING_QUEUED if scale.dry else None) if program == "launch-queue" else lacks
        # These steps mostly wait for timeouts, so they run together. Only with two ranks, because more ranks would
        # delay each other on the GPU that they share.
        together = program == "lose" and ranks == 2
        found.append(Step(name, command, seconds, read, environment, why, together))

    for program, ranks, names in scale.ranks.plan:
        if program == "lose":
            for kind in names:
                read = partial(_read_lost, kind, ranks, scale.ranks.hang_timeout)
                add(f"{kind} {ranks}", program, ranks, 120.0, read, kind)
        elif program == "train":
            add(f"training {ranks}", program, ranks, 280.0, partial(_read_training, ranks, names), *names)
        elif program == "collectives":
            add(f"collectives {ranks}", program, ranks, 200.0, partial(_read_collectives, ranks))
        else:
            add("launch queue", program, ranks, 60.0, _read_queue)
    return found


def main(argv: list[str] | None = None) -> None:
    """Start the ranks of a step."""
    parser = argparse.ArgumentParser(description="Ranks of one step, all on one card.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("program")
    parser.add_argument("ranks", type=int)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    sizes = (DRY if args.dry_run else CARD).ranks
    launcher = _Launcher(args.folder, args.program, args.ranks, ["--dry-run"] * args.dry_run, sizes.starting)
    if args.program != "collectives" and launcher.transport() is None:
        sys.exit(f"not run, since the step 'collectives {args.ranks}' has found no way between ranks that works")
    if args.program == "collectives":
        launcher.find_transport(sizes.patience)
    elif args.program == "train":
        launcher.train(args.names, 3 * sizes.patience)
    else:
        (args.folder / _FOUND).unlink(missing_ok=True)
        # A rank stopped by SIGSTOP does not end by itself, so it is not waited for.
        stopped = args.names == ["stopped"]
        for rank in launcher.run(args.names, 2 * sizes.hang_timeout + sizes.patience, spare=stopped, grace=None):
            note(args.folder, name="did not end", rank=rank)


class _Launcher:
    """Starts ranks as torchrun does. Ranks may end at different times; the launcher kills all ranks that still run."""

    def __init__(self, folder: Path, program: str, ranks: int, flags: Sequence[str], starting: float) -> None:
        self.folder, self.program, self.ranks, self.flags, self.starting = folder, program, ranks, flags, starting

    def find_transport(self, patience: float) -> None:
        """Try transports until all ranks have results with one; store it for later steps, or null if none works."""
        path = self.folder / _TRANSPORT
        for transport in TRANSPORTS:
            (self.folder / _FOUND).unlink(missing_ok=True)
            self.run([], patience, transport)
            if len(notes(self.folder)) == self.ranks:
                path.write_text(json.dumps(transport))
                return
            print("no collectives over", transport or "the transport that NCCL chooses", flush=True)
        path.write_text("null")

    def train(self, names: Sequence[str], patience: float) -> None:
        """Train each case that has not passed. After a case that fails or hangs, new ranks continue with the next."""
        tried: set[str] = set()
        while left := [name for name in names if name not in tried and name not in _passed(self.folder)]:
            before = len(notes(self.folder))
            self.run(left, patience)
            new = notes(self.folder)[before:]
            tried.update(each["name"] for each in new)
            stuck = [name for name in left if name not in tried]
            if stuck and not any("error" in each for each in new):
                note(self.folder, name=stuck[0], error=f"the ranks ended or hung without a result in {patience:g} s")
                tried.add(stuck[0])

    def run(
        self, names: Sequence[str], patience: float, transport: Mapping[str, str] | None = None, *, spare: int = 0,
        grace: float | None = GRACE,
    ) -> list[int]:  # fmt: skip
        """Start all ranks, wait for them, and kill those that do not end.

        Args:
            names: names of cases, or of one way to lose a rank.
            patience: seconds after the start in which some rank must end or write a result, again after each result.
            transport: environment variables of the transport; None for the one that works.
            spare: number of ranks that need not end.
            grace: seconds that the other ranks have after one has failed; None for no limit.

        Returns:
            The ranks that were killed.
        """
        # The loopback's address works without a network. A variable that the caller has set comes first.
        environment = {
            "NCCL_SOCKET_IFNAME": "lo",
            **os.environ,
            **((self.transport() or {}) if transport is None else transport),
            "MASTER_ADDR": "127.0.0.1",
        }
        environment |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(self.ranks), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"LOCAL_WORLD_SIZE": str(self.ranks)}
        command = [sys.executable, "-m", "bench.gpu.nccl_ranks", self.program, str(self.folder), *names, *self.flags]
        started = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(self.ranks)
        ]
        seen, since, failed = (len(notes(self.folder)), 0), time.monotonic() + self.starting, 0.0
        while sum(process.poll() is None for process in started) > spare:
            time.sleep(0.05)
            now = time.monotonic()
            progress = len(notes(self.folder)), sum(process.poll() is not None for process in started)
            if progress != seen:
                seen, since = progress, now
                failed = failed or now * any(process.returncode for process in started)
            if now - since > patience or (grace is not None and failed and now - failed > grace):
                break
        endless = [rank for rank, process in enumerate(started) if process.poll() is None]
        for process in started:
            process.kill()
            process.wait()
        return endless

    def transport(self) -> dict[str, str] | None:
        """Return the transport that worked for collectives with as many ranks; NCCL's own choice if not tested."""
        path = self.folder.parent / f"collectives-{self.ranks}" / _TRANSPORT
        found: dict[str, str] | None = json.loads(path.read_text()) if path.exists() else {}
        return found


def _last(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each case. If several ranks report errors in a row, the first error is returned."""
    last: dict[str, dict[str, Any]] = {}
    for each in notes(folder):
        if not ("error" in each and "error" in last.get(each["name"], {})):
            last[each["name"]] = each
    return last


def _passed(folder: Path) -> set[str]:
    return {name for name, found in _last(folder).items() if found.get("wrong") == ""}


def _read_collectives(ranks: int, ended: Ended) -> Outcome:
    found = notes(ended.folder)
    wrong = [f"rank {each['rank']}: {each['wrong']}" for each in found if each["wrong"]]
    if wrong:
        return Outcome(State.WRONG, [], "; ".join(wrong))
    if ended.code is None or ended.code or len(found) < ranks:
        return _unfinished(ended)
    transport = json.loads((ended.folder / _TRANSPORT).read_text())
    words = [f"NCCL {found[0]['nccl'] or 'none, on CPU'}", *(f"{name}={value}" for name, value in transport.items())]
    row = {"check": "collectives", "ranks": str(ranks), "result": "right values", "note": ", ".join(words)}
    return Outcome(State.MEASURED, [row | {"seconds": f"{max(each['seconds'] for each in found):.1f}"}])


def _unfinished(ended: Ended) -> Outcome:
    """Return the outcome of a step without results."""
    return Outcome(State.UNFINISHED if ended.code is None else State.WRONG, [], last_words(ended, 12))


def _read_training(ranks: int, names: Sequence[str], ended: Ended) -> Outcome:
    found = _last(ended.folder)
    if not found:
        return _unfinished(ended)
    rows = [_training_row(ranks, name, found[name]) for name in names if name in found]
    wrong = [f"{name}: {each.get('error') or each['wrong']}" for name, each in found.items() if each.get("wrong") != ""]
    if wrong:
        return Outcome(State.WRONG, rows, "; ".join(wrong))
    missing = [name for name in names if name not in found]
    if missing:
        why = f"time ran out before {missing[0]} and {len(missing) - 1} more; what has passed is not run again"
        return Outcome(State.UNFINISHED, rows, why)
    return Outcome(State.MEASURED, rows)


def _training_row(ranks: int, name: str, found: dict[str, Any]) -> Row:
    row = {"check": name, "ranks": str(ranks)}
    if "error" in found:
        return row | {"result": "failed", "note": _cell(found["error"])}
    same = "same bits" if not found["differ"] else f"{found['differ']:.0f} tensors differ"
    memory = {
        f"{kind} MiB": " / ".join(f"{each[kind] / 2**20:.0f}" for each in found["memory"])
        for kind in ("allocated", "reserved", "outside")
    }
    return {
        **row, **memory,
        "result": same if found["exact"] else f"{same}, as they may",
        "losses apart": f"{found['losses']:.1e}",
        "weights apart": f"{found['apart']:.1e}",
        "CPU losses": f"{found['cpu_losses']:.1e}",
        "CPU weights": f"{found['cpu_apart']:.1e}",
        "planned MiB": f"{found['planned'] / 2**20:.0f} ({found['communicators']})",
        "seconds": f"{found['seconds']:.1f}",
        "note": found["wrong"] or f"last loss {found['last_loss']:.4f}",
    }  # fmt: skip


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:_WIDTH]


def _read_lost(kind: str, ranks: int, hang_timeout: float, ended: Ended) -> Outcome:
    found = notes(ended.folder)
    if not found:
        return _unfinished(ended)
    said = {each["rank"]: each for each in found if each["name"] == kind}
    closed = {each["rank"]: each for each in found if each["name"] == "closed"}
    lost, most = ranks - 1, hang_timeout + GRACE
    heard = range(lost + (kind not in ("killed", "stopped")))
    wrong = [
        f"rank {each['rank']} did not end" for each in found if each["name"] == "did not end" and each["rank"] in heard
    ]
    for rank in heard:
        if rank not in said:
            wrong.append(f"rank {rank} said nothing and was killed")
        elif said[rank]["seconds"] > most:
            wrong.append(f"rank {rank} was heard after {said[rank]['seconds']:.1f} s, and {most:g} are allowed")
        elif rank != lost and f"rank {lost}" not in said[rank]["said"]:
            wrong.append(f"rank {rank} does not name rank {lost}: {said[rank]['said'] or 'no error'}")
        if rank in said and closed.get(rank, {"seconds": float("inf")})["seconds"] > most:
            wrong.append(f"close() of rank {rank} did not return in {most:g} s after that")
    if kind == "raising" and "planted" not in said.get(lost, {"said": ""})["said"]:
        wrong.append(f"rank {lost}, which raised, got another error than its own")
    first = said.get(0, {"said": "nothing"})
    slowest = max((each["seconds"] for each in closed.values()), default=float("nan"))
    row = {
        "check": f"last rank {kind}", "ranks": str(ranks), "result": "wrong" if wrong else "named by all others",
        "seconds": f"{max((each['seconds'] for rank, each in said.items() if rank != lost), default=0):.1f}",
        "note": f"close() took {slowest:.1f} s at most; rank 0: {_cell(first['said'])}",
    }  # fmt: skip
    return Outcome(State.WRONG if wrong else State.MEASURED, [row], "; ".join(wrong))


def _read_queue(ended: Ended) -> Outcome:
    found = notes(ended.folder)
    if not found:
        return _unfinished(ended)
    (told,) = found
    row = {
        "check": "launch queue", "ranks": "1", "seconds": f"{told['launch']:.1f}",
        "result": "queries return" if told["returned"] and told["query"] < _SOON else "queries do not return",
        "note": f"{told['queries']} queries beside launches, the longest took {told['query']:.3f} s",
    }  # fmt: skip
    if row["result"] != "queries return":
        return Outcome(State.WRONG, [row], "the thread that watches for lost ranks waits as the main thread does")
    if told["launch"] < _BLOCKED:
        return Outcome(State.WRONG, [row], "no launch had to wait, so that nothing was seen")
    return Outcome(State.MEASURED, [row])


PART = Part(
    "nccl",
    "Several ranks over NCCL on one card",
    [
        "check", "ranks", "result", "losses apart", "weights apart", "CPU losses", "CPU weights", "allocated MiB",
        "reserved MiB", "outside MiB", "planned MiB", "seconds", "note",
    ],
    steps,
    notes=(
        "All ranks share one card (NCCL_MULTI_RANK_GPU_ENABLE=1), so times say nothing of several cards.",
        "Training: steps of AdamW over NCCL, over the staged backend (gloo through host memory) on the same card, and "
        "over gloo on the CPU. Losses and whole weights must have the bits of the staged backend wherever a sum has "
        "one order. With two ranks every sum has one, since a + b = b + a. With four, sums have one where the engine "
        "exchanges values and adds them in the order of ranks, and where each hop has two ranks. They need not where "
        "NCCL adds the values of four ranks: 32-bit gradients without a level of nodes, and 16-bit ones with "
        '`reduce_scatter: "backend"` ("as they may"). The sum of squares for clipping is such a sum, too, so with four '
        "ranks only these cases clip. Losses apart: relative, the worst of all ranks. Weights apart: as a share of "
        f"the way that they have gone. Bounds of both where the order differs: {ORDER_BOUNDS[False]} in float32 and "
        f"{ORDER_BOUNDS[True]} in bf16; for the CPU: {CPU_BOUNDS[False]} and {CPU_BOUNDS[True]}.",
        "Memory of one rank: after wrapping / the first step / the last. Outside of torch's allocator: the driver's "
        "figure for the whole card, less all that the ranks have reserved, divided by the ranks, less the same before "
        "wrapping. The same kernels ran over the staged backend before, so they are not in it. Planned: the bytes "
        "of communicators that `zeropp.plan.memory` expects for one engine (and how many).",
        "A lost rank: the last one is killed, stopped, raises in a forward, or closes its engine alone, while the "
        "others take a step. Each of these must raise an error that names the lost rank within hang_timeout + "
        f"{GRACE:g} s, and then close its engine in the same time. Seconds: until the last of them had raised.",
        "Launch queue: a kernel spins, and the host launches behind it until a launch has to wait. Seconds: of the "
        "longest launch.",
    ),
    needs=("pydantic",),
    seconds=570.0,
    keeps_wrong=True,
)  # fmt: skip


if __name__ == "__main__":
    main()
