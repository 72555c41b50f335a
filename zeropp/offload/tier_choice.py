"""The choice of a storage tier for each kind of numbers of the flat buffers.

`TierOptions` describes which numbers are kept off the device. `open_tiers` opens files, staging buffers and the
read-ahead thread for them. `divide_steps` computes how many elements of each shard are stepped on the device when the
host steps the others.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zeropp.offload.read_ahead import GdsReader, ReadAhead, Ring
from zeropp.offload.storage_tiers import (
    Files,
    FileTensor,
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
    "choose_staging",
    "choose_tiers",
    "divide_steps",
    "open_tiers",
    "staging_nbytes",
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
        pin_memory: True if staging buffers are page-locked.
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
    """

    stepped: Offload | None = None
    weights: Offload | None = None
    io: IoOptions = IoOptions()  # noqa: RUF009  # immutable

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
        reader: thread that reads weights for gathers; None if they are on the device.
        ring: staging buffers for gradients and for steps on the host; None if nothing leaves the device.
        device_numel: number of elements at the front of a shard that the wrapped optimizer steps, with their states
            next to the main weights; the host's cores step the others.
        close: function that closes files, staging buffers and threads.
    """

    main: StorageTier
    states: StorageTier
    gradients: StorageTier
    weights: StorageTier
    reader: ReadAhead | None = None
    ring: Ring | None = None
    device_numel: int = ALL
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
    options: TierOptions, device: torch.device, staging: tuple[Staging | None, Staging | None], space: Mapping[str, int]
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
        main, kept = choose_tiers(options, Memory(device), host, _Swapping(options.io, host, opened, space))
        steps, reads = staging
        ring = reader = None
        if steps is not None:
            ring = Ring(steps.count, steps.nbytes, pinned=steps.pinned)
            opened.callback(ring.close)
        if reads is not None:
            straight = GdsReader(device) if options.io.use_gds else None
            reader = ReadAhead(Ring(reads.count, reads.nbytes, pinned=reads.pinned), straight)
            opened.callback(reader.close)
        failed.pop_all()
    return Tiers(main, main, main, kept, reader, ring, ALL if options.stepped is None else 0, opened.close)


def choose_tiers(
    options: TierOptions, memory: StorageTier, host: StorageTier, files: Callable[[str], Files]
) -> tuple[StorageTier, StorageTier]:
    """Return two tiers: for main weights with gradients and states, and for frozen weights and wire copies.

    A wire copy is the offloaded copy of a shard that gathers start from.

    Args:
        options: the numbers that are kept off the device.
        memory: tier of the device that trains.
        host: tier of host memory.
        files: function that opens the tier of files in a directory.
    """

    def tier(part: Offload | None) -> StorageTier:
        if part is None:
            return memory
        if part.path is None:
            return host
        # Both kinds may have the same directory, and then share a swap file.
        own = files(part.path)
        return own if part.max_in_cpu is None else PartlyInMemory(own, part.max_in_cpu)

    return tier(options.stepped), tier(options.weights)


@dataclass(frozen=True)
class Staging:
    """Sizes of a ring of staging buffers.

    Attributes:
        count: number of buffers.
        nbytes: bytes of one buffer.
        pinned: True if the buffers are page-locked.
    """

    count: int
    nbytes: int
    pinned: bool

    @property
    def total(self) -> int:
        """Bytes of all buffers together."""
        return self.count * self.nbytes


def choose_staging(
    options: TierOptions, device: torch.device, largest: int, itemsize: int
) -> tuple[Staging | None, Staging | None]:
    """Return the staging buffers for steps on the host, and those for reads of gathers; None where none are needed.

    Args:
        options: the numbers that are kept off the device, with numbers and sizes of staging buffers.
        device: the device that trains.
        largest: elements of the largest shard of main weights on this rank.
        itemsize: bytes of an element of the largest dtype of main weights.
    """
    stepped, weights = options.stepped, options.weights
    weights_away = weights is not None and not weights.serves(device)
    # Page-locking is useful only for CUDA devices, and torch refuses it without CUDA.
    pinned = device.type == "cuda"
    steps = reads = None
    if stepped is not None and (weights_away or not stepped.serves(device)):
        # Not larger than the largest shard needs, so that small models with default settings do not allocate gigabytes.
        nbytes = staging_nbytes(stepped.buffer_count, min(stepped.buffer_numel, largest) * itemsize)
        steps = Staging(stepped.buffer_count, nbytes, pinned and stepped.pin_memory)
    if weights is not None and weights_away:
        nbytes = _aligned(min(weights.buffer_numel, largest) * itemsize)
        reads = Staging(weights.buffer_count, nbytes, pinned and weights.pin_memory)
    return steps, reads


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
