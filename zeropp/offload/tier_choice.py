"""The choice of a tier for each part of an engine's flat buffers, by the configuration.

`open_tiers` makes room: files, staging buffers, and the thread that reads ahead. `PartialOffload` gives each buffer its
tiers where the device steps one part and the host the other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zeropp.config import Config
from zeropp.config.zero_block import OffloadOptimizerConfig, OffloadParamConfig
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
from zeropp.offload.transfer import Transfers
from zeropp.partition.levels import BLOCK

__all__ = [
    "ALL",
    "PartialOffload",
    "Staging",
    "Tiers",
    "at_device",
    "choose_staging",
    "choose_tiers",
    "open_tiers",
    "staging_nbytes",
]

ALL = sys.maxsize
"""More elements than any shard has."""

# Kinds of numbers in a tile (main weights, gradients, three states, and new weights as they travel), in each of the
# three tiles that are under way at most: one that is read, one that is stepped, and one that is written.
_PARTS = 6 * 3


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


class PartialOffload:
    """Gives each trainable buffer its tiers: with the device's part of what is stepped, the host's, or both.

    Decided buffer by buffer, in the order in which the model defines them, which mostly is that of forward: what the
    next forward wants first is stepped on the device, and the host's part has until later. The border may lie within a
    buffer. Then the device has its main weights and gradients, and of the optimizer's states the front.
    """

    def __init__(self, config: Config, tiers: Tiers, memory: StorageTier, numels: Sequence[int]) -> None:
        """Divide.

        Args:
            config: says which fraction is the host's.
            tiers: of what is the host's, or of everything.
            memory: of the device.
            numels: elements of the shards of all trainable buffers.
        """
        block = config.zero.offload_optimizer
        self._homes = tiers
        self._left = 0
        # Whatever is not stepped stays where it would be, and is read from there.
        self._near = replace(tiers, main=memory, states=memory, gradients=memory, device_numel=ALL)
        if config.steps_on_host and block is not None:
            self._left = sum(numels) - round(block.ratio * sum(numels))

    def next(self, numel: int) -> Tiers:
        """Tiers of the next buffer, in the order of ``numels``, whose shard has so many elements."""
        if numel <= self._left:
            self._left -= numel
            return self._near
        # Whole blocks: kernels step what lies behind a multiple of their vectors to the same bits as in one call.
        here = self._left // BLOCK * BLOCK
        self._left = 0
        return replace(self._near, states=self._homes.states, device_numel=here) if here else self._homes


def at_device(device: torch.device) -> Tiers:
    """Everything in the memory of the device that trains."""
    memory = Memory(device)
    return Tiers(memory, memory, memory, memory)


def open_tiers(config: Config, device: torch.device, largest: int, itemsize: int, space: Mapping[str, int]) -> Tiers:
    """Make room for what the configuration takes off the device.

    Args:
        config: whose offload blocks say what that is.
        device: that trains.
        largest: elements of the largest shard of main weights on this rank.
        itemsize: bytes of the largest kind of main weight.
        space: bytes of files below each path that are taken now, before there is anything to put there.

    Raises:
        OSError: a file cannot be made, or there is no space.
        ValueError, ImportError: files cannot be read straight into the device, as the configuration asks.
    """
    host = host_memory(device)
    opened = contextlib.ExitStack()
    # What was opened before something failed is closed again, and what was not stays until the engine's end.
    with contextlib.ExitStack() as failed:
        failed.push(opened)
        files = _Swapping(config, host, opened, space)
        main, kept = choose_tiers(config, Memory(device), host, files)
        steps, reads = choose_staging(config, device, main, kept, largest, itemsize)
        ring = reader = None
        if steps is not None:
            ring = Ring(steps.count, steps.nbytes, pinned=steps.pinned)
            opened.callback(ring.close)
        if reads is not None:
            straight = GdsReader(device) if config.aio.use_gds else None
            reader = ReadAhead(Ring(reads.count, reads.nbytes, pinned=reads.pinned), straight)
            opened.callback(reader.close)
        failed.pop_all()
    return Tiers(main, main, main, kept, reader, ring, 0 if config.steps_on_host else ALL, opened.close)


def choose_tiers(
    config: Config, memory: StorageTier, host: StorageTier, files: Callable[[str], Files]
) -> tuple[StorageTier, StorageTier]:
    """Tiers of main weights and what is stepped with them, and of what gathers begin with.

    Args:
        config: whose offload blocks say where they are.
        memory: of the device that trains.
        host: memory of the host.
        files: opens those below a path.
    """
    states = config.zero.offload_optimizer if config.steps_on_host else None
    weights = config.zero.offload_param
    main = memory if states is None else _home(states, memory, host, files)
    return main, memory if weights is None else _home(weights, memory, host, files)


def _home(
    block: OffloadOptimizerConfig | OffloadParamConfig,
    memory: StorageTier,
    host: StorageTier,
    files: Callable[[str], Files],
) -> StorageTier:
    if block.device == "none":
        return memory
    if block.device == "cpu":
        return host
    # By its text: both blocks may name one path, and share a file.
    own = files(str(block.nvme_path))
    return PartlyInMemory(own, block.max_in_cpu) if isinstance(block, OffloadParamConfig) else own


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
    config: Config, device: torch.device, main: StorageTier, kept: StorageTier, largest: int, itemsize: int
) -> tuple[Staging | None, Staging | None]:
    """Staging buffers for what is stepped, and for what is read for gathers; None where nothing leaves the device.

    Args:
        config: whose offload blocks say how many and how large.
        device: that trains.
        main: tier of main weights.
        kept: tier of what gathers begin with.
        largest: elements of the largest shard of main weights on this rank.
        itemsize: bytes of the largest kind of main weight.
    """
    states = config.zero.offload_optimizer if config.steps_on_host else None
    weights = config.zero.offload_param
    # Other devices gain nothing by it, and without CUDA torch refuses.
    pinned = device.type == "cuda"
    steps = reads = None
    if states is not None and not (main.serves(device) and kept.serves(device)):
        # No more than a step has use for: small models on the default settings must not ask for gigabytes.
        nbytes = staging_nbytes(states.buffer_count, min(config.zero.sub_group_size, largest) * itemsize)
        steps = Staging(states.buffer_count, nbytes, pinned and states.pin_memory)
    if weights is not None and not kept.serves(device):
        nbytes = _aligned(min(weights.buffer_size, largest) * itemsize)
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
        self, config: Config, host: StorageTier, opened: contextlib.ExitStack, space: Mapping[str, int]
    ) -> None:
        self._aio = config.aio
        self._host = host
        self._opened = opened
        self._space = space
        self._files: dict[str, Files] = {}

    def __call__(self, path: str) -> Files:
        if path not in self._files:
            # Closed in the opposite order: transfers end before their file.
            swap = self._opened.enter_context(contextlib.closing(SwapFile(path)))
            swap.reserve(self._space.get(path, 0))
            transfers = self._opened.enter_context(contextlib.closing(Transfers(self._aio)))
            self._files[path] = Files(partial(_in_file, swap, transfers), self._aio.block_size, self._host)
        return self._files[path]


def _in_file(swap: SwapFile, transfers: Transfers, numel: int, dtype: torch.dtype) -> StoredTensor:
    return FileTensor(swap.allocate(numel, dtype), transfers)
