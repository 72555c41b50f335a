"""Training and validation text as bytes, and batches of windows drawn from it.

The default text exists on every machine with Python: the source files of the standard library.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Folders that are not part of the library itself, and that only some installations have.
_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})
_SEPARATOR = b"\n\n"


@dataclass(frozen=True)
class Text:
    """Training and validation text as 1-D uint8 tensors, and the number of files read.

    ``train`` and ``validation`` consist of different files, unless there are too few files.
    """

    train: Tensor
    validation: Tensor
    files: int


def standard_library() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def list_files(sources: Sequence[Path] = ()) -> list[Path]:
    """Return the files to read, in an order that is the same on every machine: by source, then by path below it.

    Args:
        sources: files, and folders whose files are all used, except hidden ones and compiled Python. If empty: the
            ``.py`` files of the standard library without its tests.
    """
    if not sources:
        root = standard_library()
        found = [p for p in root.rglob("*.py") if not _SKIPPED.intersection(p.relative_to(root).parts)]
        return sorted(found, key=lambda path: path.relative_to(root).as_posix())
    files: list[Path] = []
    for source in sources:
        if source.is_file():
            files.append(source)
        elif source.is_dir():
            below = ((p, p.relative_to(source).parts) for p in source.rglob("*") if p.is_file())
            visible = [p for p, parts in below if not any(n.startswith(".") or n == "__pycache__" for n in parts)]
            files.extend(sorted(visible, key=lambda path: path.relative_to(source).as_posix()))
        else:
            raise ValueError(f"--data {source}: expected a file or a directory, found neither")
    return files


def load_text(sources: Sequence[Path] = (), holdout_every: int = 20) -> Text:
    """Read the files, and put the last of every ``holdout_every`` files into the validation text.

    Whole files are held out, so that no validation window continues a text seen in training. If there are fewer than
    ``holdout_every`` files, the joined text is cut at the same proportion instead.
    """
    if holdout_every < 2:
        raise ValueError(f"holdout_every={holdout_every}: expected at least 2, to leave some to train on")
    pieces = [path.read_bytes() + _SEPARATOR for path in list_files(sources)]
    if not pieces:
        raise ValueError(f"no text found in {[str(s) for s in sources] or str(standard_library())}")
    if len(pieces) < holdout_every:
        whole = b"".join(pieces)
        cut = len(whole) - len(whole) // holdout_every
        train, held = whole[:cut], whole[cut:]
    else:
        last = holdout_every - 1
        train = b"".join(piece for i, piece in enumerate(pieces) if i % holdout_every != last)
        held = b"".join(piece for i, piece in enumerate(pieces) if i % holdout_every == last)
    return Text(_as_tensor(train), _as_tensor(held), files=len(pieces))


def _as_tensor(data: bytes) -> Tensor:
    # bytearray, because torch.frombuffer warns about read-only memory.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Batches:
    """Random windows of a text, which depend on the fields below, the step and the micro-batch only.

    The windows of an optimizer step are drawn for all ranks together, and each rank takes its own rows. So ranks train
    on different windows, and a step trains on the same windows if only their split over ranks and micro-batches
    changes: 2 ranks x 8 windows equal 1 rank x 16 windows and 1 rank x 2 micro-batches x 8 windows.
    """

    text: Tensor  # [N] uint8
    batch: int  # windows per rank and micro-batch
    seq_len: int
    rank: int = 0
    world: int = 1
    seed: int = 0
    accumulate: int = 1  # micro-batches per optimizer step

    def __post_init__(self) -> None:
        if self.text.numel() <= self.seq_len:
            raise ValueError(
                f"{self.text.numel()} bytes of text are too few for windows of {self.seq_len} and one target "
                "more: give more --data, or a smaller --seq-len"
            )

    def starts(self, step: int, micro: int = 0) -> Tensor:
        """Return the start positions of this rank's windows in a micro-batch, [batch]."""
        # A new generator for each step, so that a resumed run needs no replay. Seeds are 2**20 steps apart.
        draw = torch.Generator().manual_seed((self.seed << 20) + step)
        count = self.accumulate * self.world * self.batch
        every = torch.randint(self.text.numel() - self.seq_len, (count,), generator=draw)
        place = (micro * self.world + self.rank) * self.batch
        return every[place : place + self.batch]

    def at(self, step: int, micro: int = 0) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and targets for a micro-batch of ``step``, both int64 [batch, seq_len]."""
        return _windows(self.text, self.starts(step, micro), self.seq_len)


def on_device(batch: tuple[Tensor, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy inputs and targets to a device without making the host wait for the GPU.

    A copy from pageable memory makes the host wait until the stream has finished its work, so the next step is issued
    late. Pinned memory avoids that. The allocator reuses a pinned block only after the GPU has read it.
    """
    if device.type == "cuda":
        batch = batch[0].pin_memory(), batch[1].pin_memory()
    return batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)


def validation_batches(
    text: Tensor, batch: int, seq_len: int, windows: int, rank: int = 0, world: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same evenly spaced windows on each call, split over ranks, with equally many batches on every rank.

    ``windows`` is rounded up to a multiple of ``world * batch``, because all ranks must call forward equally often:
    each forward gathers weights.
    """
    share = world * batch
    windows = -(-windows // share) * share
    last = text.numel() - seq_len - 1
    if last < 0:
        raise ValueError(f"{text.numel()} bytes are too few to validate on windows of {seq_len}")
    starts = torch.linspace(0, last, windows, dtype=torch.float64).long()
    for mine in starts[rank::world].split(batch):
        yield _windows(text, mine, seq_len)


def _windows(text: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    index = starts[:, None] + torch.arange(seq_len + 1)
    rows = text[index].long()  # [batch, seq_len + 1]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Windows(Dataset[Tensor]):
    """Data set of ``count`` windows of ``length + 1`` bytes of a file, at random positions that ``seed`` fixes."""

    def __init__(self, path: Path, length: int, count: int = 4096, seed: int = 0) -> None:
        self.text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        self.length = length
        self.starts = torch.randint(len(self.text) - length, (count,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + self.length + 1]
