"""The choice of a storage tier for each kind of numbers of the flat buffers.

`TierOptions` describes which numbers are kept off the device. `open_tiers` opens files, staging buffers and the
read-ahead thread for them. `divide_steps` computes how many elements of each shard are stepped on the device when the
host steps the others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zeropp.offload.read_ahead import GdsReader, ReadAhead, Ring
from zeropp.offload.storage_tiers import (
    Files,
    FileTensor,
    HostMemory,
    Memory,
    PartlyInMemory,
    StorageTier,
    StoredTensor,
    host_memory,
)
from zeropp.offload.swap import ALIGNED, SwapFile
from zeropp.offload.transfer import IoOptions, Transfers
from zeropp.partition.levels import BLOCK

__all__ = [
    "ALL",
    "Offload",
    "Staging",
    "TierOptions",
    "Tiers",
    "at_device",
    "can_page_lock",
    "choose_staging",
    "choose_tiers",
    "divide_steps",
    "open_tiers",
    "staging_nbytes",
    "upload_staging",
]

ALL = sys.maxsize
"""A number of elements larger than any shard, for "all of them"."""

# Largest number of parts into which the staging buffers are divided: 6 kinds of numbers (main weights, gradients, three
# optimizer states, new weights to send on), for each of 3 sub-groups in flight (one read, one stepped, one written).
_PARTS = 6 * 3


@dataclass(frozen=True)
class Offload:
    """Settings for one kind of offloading: optimizer states (``offload_optimizer``) or weights (``offload_param``).

    The first kind includes main weights and gradients.

    Attributes:
        path: directory of the swap file (``nvme_path``); None for host memory.
        buffer_numel: largest number of elements in a staging buffer.
        buffer_count: number of staging buffers.
        pin_memory: True to page-lock staging buffers, and rows in host memory that a GPU copies to or from.
        max_in_cpu: elements that stay in host memory although there is a path; None to put all of them in the file.
        ratio: fraction of the elements that the host steps.
    """

    path: str | None
    buffer_numel: int
    buffer_count: int
    pin_memory: bool
    max_in_cpu: int | None = None
    ratio: float = 1.0

    def serves(self, device: torch.device) -> bool:
        """Return True if offloading changes nothing: the numbers are in host memory and the host is ``device``."""
        return self.path is None and host_memory(device).serves(device)


@dataclass(frozen=True)
class TierOptions:
    """All numbers that are kept off the device.

    Attributes:
        stepped: settings for main weights, gradients and optimizer states, which the host steps; None if they are on
            the device.
        weights: settings for frozen weights and for the copies that gathers start from between steps; None if they are
            on the device.
        io: settings for reads and writes of files.
        gathers_main: True if the compute dtype is that of the main weights, so that gathers read main weights in host
            memory, and no second copy is kept.
    """

    stepped: Offload | None = None
    weights: Offload | None = None
    io: IoOptions = IoOptions()  # noqa: RUF009  # immutable
    gathers_main: bool = False

    @property
    def paths(self) -> set[str]:
        """Directories of the swap files."""
        return {part.path for part in (self.stepped, self.weights) if part is not None and part.path is not None}


@dataclass(frozen=True)
class Tiers:
    """Storage tier of each kind of numbers, and the staging buffers between tiers and device.

    Attributes:
        main: tier of main weights.
        states: tier of the optimizer states of elements that the host steps.
        gradients: tier of reduced gradients, which are summed there.
        weights: tier of frozen weights and of the copies that gathers start from between steps.
        reader: thread that reads weights in files for gathers; None if no weights are in files.
        ring: staging buffers of the host's step for numbers that are not in host memory, and of gradients in files;
            None if all is in host memory.
        device_numel: number of elements at the front of a shard that the wrapped optimizer steps, with their states
            next to the main weights; the host's cores step the others.
        stepped: settings of the step on the host; None if there is none.
        close: function that closes files, staging buffers and threads.
    """

    main: StorageTier
    states: StorageTier
    gradients: StorageTier
    weights: StorageTier
    reader: ReadAhead | None = None
    ring: Ring | None = None
    device_numel: int = ALL
    stepped: Offload | None = None
    close: Callable[[], None] = lambda: None

    def main_tier(self, trainable: bool) -> StorageTier:
        """Return the tier of a buffer's main shard: ``main`` if it is trainable, ``weights`` if it is frozen."""
        return self.main if trainable else self.weights

    @property
    def steps_on_host(self) -> bool:
        """True if ``device_numel`` is 0. In the engine's tiers, from :func:`open_tiers`, the host then takes steps."""
        return self.device_numel == 0

    def divided(self, device_numel: int, memory: StorageTier) -> Tiers:
        """Return the tiers of a buffer whose first ``device_numel`` shard elements are stepped on the device.

        Main weights and gradients are then in ``memory``, the device's memory. Optimizer states are there, too, if all
        elements are stepped on the device.

        Args:
            device_numel: elements at the front of the shard that the device steps; ``ALL`` for all.
            memory: tier of the device's memory.
        """
        if device_numel == self.device_numel:
            return self
        # Only numbers that are stepped move to the device, so the tier named weights does not change.
        near = replace(self, main=memory, gradients=memory, device_numel=device_numel)
        return replace(near, states=memory) if device_numel == ALL else near


def divide_steps(options: TierOptions, numels: Sequence[int]) -> list[int]:
    """Return, for each trainable shard, the number of elements at its front that are stepped on the device, or ``ALL``.

    The device's fraction is given to whole buffers in the order in which the model defines them, which is mostly the
    order of forward. So the weights that the next forward needs first are stepped on the device, and the host has more
    time for the later ones. The border may be within a buffer. The device then has the buffer's main weights and
    gradients, and the front of its optimizer states.

    Args:
        options: ``options.stepped.ratio`` is the fraction of all elements that the host steps.
        numels: elements of the shard of each trainable buffer.
    """
    if options.stepped is None:
        return [ALL] * len(numels)
    left = sum(numels) - round(options.stepped.ratio * sum(numels))
    parts = []
    for numel in numels:
        if numel <= left:
            parts.append(ALL)
            left -= numel
        else:
            # A border between blocks is a multiple of the kernels' vectors, so elements behind it get the same bits as
            # in one call for the whole shard.
            parts.append(left // BLOCK * BLOCK)
            left = 0
    return parts


def at_device(device: torch.device) -> Tiers:
    """Return tiers with everything in the memory of ``device``, which trains."""
    memory = Memory(device)
    return Tiers(memory, memory, memory, memory)


def open_tiers(
    options: TierOptions, device: torch.device, staging: Mapping[str, Staging], space: Mapping[str, int]
) -> Tiers:
    """Open files, staging buffers and threads for the numbers that are kept off the device.

    Args:
        options: the numbers that are kept off the device.
        device: the device that trains.
        staging: sizes of the staging buffers, from :func:`choose_staging`.
        space: bytes to reserve in the swap file of each directory, so that a full disk raises now.

    Returns:
        The tiers. ``close`` of the result closes everything that was opened.

    Raises:
        OSError: a file cannot be created, or the disk has no room.
        ValueError, ImportError: ``use_gds`` is set and files cannot be read into this device's memory.
    """
    host = host_memory(device)
    opened = contextlib.ExitStack()
    # On an error, failed closes all that was opened so far. Otherwise it stays open until Tiers.close.
    with contextlib.ExitStack() as failed:
        failed.push(opened)
        tiers = choose_tiers(
            options,
            Memory(device),
            lambda locked: host if locked is None else HostMemory(locked),
            _Swapping(options.io, host, opened, space),
        )
        rings = {name: each.make_ring() for name, each in staging.items()}
        for ring in rings.values():
            opened.callback(ring.close)
        reader = None
        if (reads := rings.get("gather_staging")) is not None:
            reader = ReadAhead(reads, GdsReader(device) if options.io.use_gds else None)
            opened.callback(reader.close)
        failed.pop_all()
    return replace(tiers, reader=reader, ring=rings.get("step_staging"), close=opened.close)


def choose_tiers(
    options: TierOptions,
    memory: Memory,
    host: Callable[[torch.device | None], StorageTier],
    files: Callable[[str], Files],
) -> Tiers:
    """Return the tiers of all rows, without staging buffers.

    Args:
        options: the numbers that are kept off the device.
        memory: tier of the device that trains.
        host: function that returns the tier of host memory; its argument is the GPU for which rows are page-locked.
        files: function that opens the tier of files in a directory.
    """

    def tier(part: Offload | None, *, copied: bool) -> StorageTier:
        """Return the tier of a part's rows; ``copied`` is True if the device copies to or from the rows."""
        if part is None:
            return memory
        own = host(memory.device if copied and part.pin_memory and can_page_lock(memory.device) else None)
        if part.path is None:
            return own
        # Both kinds may have the same directory, and then share a swap file.
        mixed = replace(files(part.path), memory=own)
        return mixed if part.max_in_cpu is None else PartlyInMemory(mixed, part.max_in_cpu)

    kept_on_host = options.weights is not None and options.weights.path is None
    main = tier(options.stepped, copied=options.gathers_main and kept_on_host)
    states = tier(options.stepped, copied=False)
    gradients = tier(options.stepped, copied=True)
    weights = tier(options.weights, copied=True)
    device_numel = ALL if options.stepped is None else 0
    return Tiers(main, states, gradients, weights, device_numel=device_numel, stepped=options.stepped)


@dataclass(frozen=True)
class Staging:
    """Sizes of a ring of staging buffers.

    Attributes:
        count: number of buffers.
        nbytes: bytes of one buffer.
        pinned: GPU for which the buffers are page-locked; None if they are not.
    """

    count: int
    nbytes: int
    pinned: torch.device | None

    @property
    def total(self) -> int:
        """Bytes of all buffers together."""
        return self.count * self.nbytes

    def make_ring(self) -> Ring:
        """Return a new ring of these sizes."""
        return Ring(self.count, self.nbytes, pinned=self.pinned)


def choose_staging(options: TierOptions, device: torch.device, largest: int, itemsize: int) -> dict[str, Staging]:
    """Return the rings of staging buffers that are needed, by their names in memory plans.

    - ``step_staging``: between files and the device or the step on the host; also for the one buffer of which the
      host steps only a part, whose main weights and gradients are on the device.
    - ``gather_staging``: for weights that gathers read from files.

    Rows in host memory need no staging buffers: the device copies to and from them directly. :func:`upload_staging` has
    the ring for new weights.

    Args:
        options: the numbers that are kept off the device, with numbers and sizes of staging buffers.
        device: the device that trains.
        largest: elements of the largest shard of main weights on this rank.
        itemsize: bytes of an element of the largest dtype of main weights.
    """
    stepped, weights = options.stepped, options.weights
    lockable = device if can_page_lock(device) else None
    found = {}
    if stepped is not None and not (stepped.serves(device) and (weights is None or weights.serves(device))):
        # Not larger than the largest shard needs, so that small models with default settings do not allocate gigabytes.
        nbytes = min(stepped.buffer_numel, largest) * itemsize
        locked = lockable if stepped.pin_memory else None
        if options.paths or stepped.ratio < 1:
            count = stepped.buffer_count
            found["step_staging"] = Staging(count, staging_nbytes(count, nbytes), locked)
    if weights is not None and weights.path is not None:
        nbytes = _aligned(min(weights.buffer_numel, largest) * itemsize)
        found["gather_staging"] = Staging(weights.buffer_count, nbytes, lockable if weights.pin_memory else None)
    return found


def can_page_lock(device: torch.device) -> bool:
    """Return True if host memory may be page-locked: that is useful only for CUDA devices, and torch refuses others."""
    return device.type == "cuda"


def upload_staging(stepped: Offload, device: torch.device, sizes: Iterable[tuple[int, int]]) -> Staging | None:
    """Return the ring of staging buffers for new weights on their way to the device; None if none go there.

    Args:
        stepped: settings of the step on the host.
        device: the device that trains.
        sizes: for each shard whose new weights go to the device, its elements and the bytes of an element.
    """
    nbytes = max((min(stepped.buffer_numel, numel) * itemsize for numel, itemsize in sizes), default=0)
    if not nbytes:
        return None
    # Two buffers: the step fills one while the other is copied.
    return Staging(2, _aligned(nbytes), device if stepped.pin_memory and can_page_lock(device) else None)


def staging_nbytes(count: int, nbytes: int) -> int:
    """Return the bytes of each of ``count`` buffers: ``nbytes`` in whole pages, at least ``_PARTS`` pages in all."""
    return max(_aligned(nbytes), -(-_PARTS // count) * ALIGNED)


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNED) * ALIGNED


class _Swapping:
    """Opens one swap file per directory, at the first request, with the reserved space."""

    def __init__(
        self, io: IoOptions, host: StorageTier, opened: contextlib.ExitStack, space: Mapping[str, int]
    ) -> None:
        self._io = io
        self._host = host
        self._opened = opened
        self._space = space
        self._files: dict[str, Files] = {}

    def __call__(self, path: str) -> Files:
        if path not in self._files:
            # The exit stack closes in reverse order, so transfers end before their file is closed.
            swap = self._opened.enter_context(contextlib.closing(SwapFile(path)))
            swap.reserve(self._space.get(path, 0))
            transfers = self._opened.enter_context(contextlib.closing(Transfers(self._io)))
            self._files[path] = Files(partial(_in_file, swap, transfers), self._io.block_size, self._host)
        return self._files[path]


def _in_file(swap: SwapFile, transfers: Transfers, numel: int, dtype: torch.dtype) -> StoredTensor:
    return FileTensor(swap.allocate(numel, dtype), transfers)
