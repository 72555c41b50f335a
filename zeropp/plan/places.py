"""Homes whose rows take no memory: an engine's own rules say where each row would be, and how large."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from zeropp.config import Config
from zeropp.offload.home import Files, Home, Memory, MemoryRow, Row
from zeropp.offload.homes import ALL, Homes, choose_homes
from zeropp.offload.swap import ALIGNED

__all__ = ["PlannedExtent", "PlannedMemory", "plan_homes"]

_META = torch.device("meta")


class PlannedMemory(Memory):
    """Memory of which nothing is taken."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Row:
        """See :class:`zeropp.offload.home.Home`."""
        # Sizes are all that is asked of it.
        return MemoryRow(torch.empty(numel, dtype=dtype, device=_META), self.place)


@dataclass(frozen=True)
class PlannedExtent(MemoryRow):
    """A row of a file that is not there.

    Attributes:
        path: the ``nvme_path`` that the file would be below.
    """

    path: str = ""
    in_memory = False
    at_hand = False

    @property
    def nbytes(self) -> int:
        """See :class:`zeropp.offload.home.Row`."""
        return -(-self.tensor.nbytes // ALIGNED) * ALIGNED


def plan_homes(config: Config, device: torch.device) -> Homes:
    """Homes as :func:`zeropp.offload.homes.open_homes` would open them, without staging buffers."""
    # Rows say where they would be by their place; their tensors are all on the meta device.
    memory = PlannedMemory(device)
    # A CPU that trains has its memory in common with the host.
    host: Home = memory if device.type == "cpu" else PlannedMemory(torch.device("cpu"), "host")
    main, kept = choose_homes(
        config, memory, host, lambda path: Files(partial(_in_file, path), config.aio.block_size, host)
    )
    return Homes(main, main, main, kept, device_numel=0 if config.steps_on_host else ALL)


def _in_file(path: str, numel: int, dtype: torch.dtype) -> Row:
    return PlannedExtent(torch.empty(numel, dtype=dtype, device=_META), "disk", path)
