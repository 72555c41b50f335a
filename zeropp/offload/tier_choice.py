"""The choice of a tier for each part of an engine's flat buffers.

`TierOptions` says what is off the device. `open_tiers` makes room: files, staging buffers, and the thread that reads
ahead. `divide_steps` says what of each buffer is stepped on the device, where the host steps the rest.
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
"""More elements than any shard has."""

# Kinds of numbers in a tile (main weights, gradients, three states, and new weights as they travel), in each of the
# three tiles that are under way at most: one that is read, one that is stepped, and one that is written.
_PARTS = 6 * 3


@dataclass(frozen=True)
class Offload:
    """One part that is kept off the device.

    Attributes:
        path: of the files below which it lies; None for the host's memory.
        buffer_numel: elements of a staging buffer, at most.
        buffer_count: staging buffers.
        pin_memory: they are page-locked.
        max_in_cpu: elements that stay in the host's memory although there is a path; None for no such part.
        ratio: the host's fraction of what is stepped.
    """

    path: str | None
    buffer_numel: int
    buffer_count: int
    pin_memory: bool
    max_in_cpu: int | None = None
    ratio: float = 1.0

    def serves(self, device: torch.device) -> bool:
        """Tell whether work on a device finds the part in its own memory."""
        return self.path is None and host_memory(device).serves(device)


@dataclass(frozen=True)
class TierOptions:
    """Everything that is kept off the device.

    Attributes:
        stepped: main weights, gradients and the optimizer's states, which the host steps; None on the device.
        weights: what gathers begin with between two steps, and frozen weights; None on the device.
        io: of files.
    """

    stepped: Offload | None = None
    weights: Offload | None = None
    io: IoOptions = IoOptions()  # noqa: RUF009  # immutable

    @property
    def paths(self) -> set[str]:
        """The paths of files."""
        return {part.path for part in (self.stepped, self.weights) if part is not None and part.path is not None}


@dataclass(frozen=True)
class Tiers:
    """The tiers of the parts of flat buffers.

    Attributes:
        main: main weights.
        states: the optimizer's states of what the host steps.
        gradients: sums of gradients.
        weights: what gathers begin with between two steps, and frozen weights.
        reader: brings weights to the device; None where they are there.
        ring: staging buffers for what comes from the device and is stepped; None where nothing leaves it.
        device_numel: elements at the front of a shard that the wrapped optimizer steps, with states beside the main
            weights; the host's cores step the others.
        close: gives files, staging buffers and threads back.
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
        """Tier of a buffer's shard: with the optimizer's states if it is stepped, which frozen weights are not."""
        return self.main if trainable else self.weights

    @property
    def steps_on_host(self) -> bool:
        """Tell whether the host steps anything."""
        return self.device_numel == 0

    def divided(self, device_numel: int, memory: StorageTier) -> Tiers:
        """The tiers of a buffer of whose shard so many elements are stepped on the device, which has this memory."""
        if device_numel == self.device_numel:
            return self
        # Whatever is not stepped stays where it would be, and is read from there.
        near = replace(self, main=memory, gradients=memory, device_numel=device_numel)
        return replace(near, states=memory) if device_numel == ALL else near


def divide_steps(options: TierOptions, numels: Sequence[int]) -> list[int]:
    """Elements at the front of each trainable shard that are stepped on the device; ALL for whole buffers.

    Decided buffer by buffer, in the order in which the model defines them, which mostly is that of forward: what the
    next forward wants first is stepped on the device, and the host's part has until later. The border may lie within a
    buffer. Then the device has its main weights and gradients, and of the optimizer's states the front.

    Args:
        options: with the fraction that is the host's.
        numels: elements of the shards of all trainable buffers.
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
            # Whole blocks: kernels step what lies behind a multiple of their vectors to the same bits as in one call.
            parts.append(left // BLOCK * BLOCK)
            left = 0
    return parts


def at_device(device: torch.device) -> Tiers:
    """Everything in the memory of the device that trains."""
    memory = Memory(device)
    return Tiers(memory, memory, memory, memory)


def open_tiers(
    options: TierOptions, device: torch.device, staging: tuple[Staging | None, Staging | None], space: Mapping[str, int]
) -> Tiers:
    """Make room for what is kept off the device.

    Args:
        options: say what that is.
        device: that trains.
        staging: from :func:`choose_staging`.
        space: bytes of files below each path that are taken now, before there is anything to put there.

    Raises:
        OSError: a file cannot be made, or there is no space.
        ValueError, ImportError: files cannot be read straight into the device, as the options ask.
    """
    host = host_memory(device)
    opened = contextlib.ExitStack()
    # What was opened before something failed is closed again, and what was not stays until the engine's end.
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
    """Tiers of main weights and what is stepped with them, and of what gathers begin with.

    Args:
        options: say where they are.
        memory: of the device that trains.
        host: memory of the host.
        files: opens those below a path.
    """

    def tier(part: Offload | None) -> StorageTier:
        if part is None:
            return memory
        if part.path is None:
            return host
        # Both parts may name one path, and share a file.
        own = files(part.path)
        return own if part.max_in_cpu is None else PartlyInMemory(own, part.max_in_cpu)

    return tier(options.stepped), tier(options.weights)


@dataclass(frozen=True)
class Staging:
    """A ring of staging buffers: how many, of so many bytes each, and whether page-locked."""

    count: int
    nbytes: int
    pinned: bool

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.count * self.nbytes


def choose_staging(
    options: TierOptions, device: torch.device, largest: int, itemsize: int
) -> tuple[Staging | None, Staging | None]:
    """Staging buffers for what is stepped, and for what is read for gathers; None where nothing leaves the device.

    Args:
        options: say how many and how large.
        device: that trains.
        largest: elements of the largest shard of main weights on this rank.
        itemsize: bytes of the largest kind of main weight.
    """
    stepped, weights = options.stepped, options.weights
    weights_away = weights is not None and not weights.serves(device)
    # Other devices gain nothing by it, and without CUDA torch refuses.
    pinned = device.type == "cuda"
    steps = reads = None
    if stepped is not None and (weights_away or not stepped.serves(device)):
        # No more than a step has use for: small models on the default settings must not ask for gigabytes.
        nbytes = staging_nbytes(stepped.buffer_count, min(stepped.buffer_numel, largest) * itemsize)
        steps = Staging(stepped.buffer_count, nbytes, pinned and stepped.pin_memory)
    if weights is not None and weights_away:
        nbytes = _aligned(min(weights.buffer_numel, largest) * itemsize)
        reads = Staging(weights.buffer_count, nbytes, pinned and weights.pin_memory)
    return steps, reads


def staging_nbytes(count: int, nbytes: int) -> int:
    """Bytes of each of ``count`` staging buffers that are to hold ``nbytes``: never too few to go on with."""
    return max(_aligned(nbytes), -(-_PARTS // count) * ALIGNED)


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNED) * ALIGNED


class _Swapping:
    """Opens a swap file for each path that is asked for, with the space that is wanted there."""

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
            # Closed in the opposite order: transfers end before their file.
            swap = self._opened.enter_context(contextlib.closing(SwapFile(path)))
            swap.reserve(self._space.get(path, 0))
            transfers = self._opened.enter_context(contextlib.closing(Transfers(self._io)))
            self._files[path] = Files(partial(_in_file, swap, transfers), self._io.block_size, self._host)
        return self._files[path]


def _in_file(swap: SwapFile, transfers: Transfers, numel: int, dtype: torch.dtype) -> StoredTensor:
    return FileTensor(swap.allocate(numel, dtype), transfers)
