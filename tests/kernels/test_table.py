"""The table of tensors anywhere in memory: kernels use the tensors' addresses at the time of the call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import DEVICE
from tests.kernels.fast import device
from zeropp_kernels import BlockTable, block_table

NUMELS, OFFSETS, NUMEL = [300, 64, 7], [0, 512, 768], 1024


@pytest.fixture
def places() -> BlockTable:
    return block_table(NUMELS, OFFSETS, NUMEL, device=DEVICE)


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(DEVICE) for numel in NUMELS]


def gathered(given: list[Tensor], places: BlockTable) -> Tensor:
    flat = torch.full((NUMEL,), float("nan"), device=DEVICE)
    device.gather_(given, places.host, places.entries, places.owners, flat, 1.0, None, None, False)
    return flat


def test_a_table_holds_owners_lengths_and_offsets(places: BlockTable) -> None:
    assert places.owners.tolist() == [0, 0, 1, 2]
    assert places.host.tolist() == places.entries.tolist() == [[0, 0, 0], NUMELS, OFFSETS]


def test_other_tensors_at_every_call(places: BlockTable) -> None:
    """Gradients are new tensors at every step. Both sets of tensors stay alive here, so their addresses differ."""
    first, second = tensors(1), tensors(2)
    for given in (first, second, first):
        flat = gathered(given, places)
        for tensor, offset in zip(given, OFFSETS, strict=True):
            assert torch.equal(flat[offset : offset + tensor.numel()], tensor)
        assert places.host[0].tolist() == places.entries[0].tolist() == [tensor.data_ptr() for tensor in given]


def test_addresses_are_sent_when_they_change(places: BlockTable) -> None:
    given = tensors(1)
    gathered(given, places)
    versions = places.host._version, places.entries._version
    gathered(given, places)
    assert (places.host._version, places.entries._version) == versions
    gathered(tensors(2), places)
    assert places.host._version > versions[0] and places.entries._version > versions[1]


def test_made_in_inference_mode_used_outside() -> None:
    with torch.inference_mode():
        made = block_table(NUMELS, OFFSETS, NUMEL, device=DEVICE)
    assert not gathered(tensors(3), made).isnan().any()
