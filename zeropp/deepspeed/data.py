"""Data loaders: a rank's part of a data set in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

__all__ = ["RepeatingLoader", "make_loader"]

_T = TypeVar("_T")


class RepeatingLoader(Generic[_T]):
    """Begins again where a loader ends, for loops that count steps.

    Each round is another epoch to a loader, or its sampler, that has ``set_epoch``, so that its order changes: the one
    after that which the sampler is at.

    Args:
        loader: to iterate over; each ``iter()`` of it begins anew.
    """

    def __init__(self, loader: Iterable[_T]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)
        self._epoch = 0

    def __iter__(self) -> RepeatingLoader[_T]:
        return self

    def __next__(self) -> _T:
        try:
            return next(self.data_iter)
        except StopIteration:
            self._next_epoch()
            self.data_iter = iter(self.loader)
        try:
            return next(self.data_iter)
        except StopIteration:
            raise RuntimeError(
                "the loader gives nothing; RepeatingLoader would look for a first batch for ever"
            ) from None

    def _next_epoch(self) -> None:
        # A sampler that is not told gives the same order again, to all ranks alike. A loader knows its own samplers;
        # of a DataLoader with a batch sampler ``sampler`` is a stand-in.
        batches = getattr(self.loader, "batch_sampler", None)
        places = (self.loader, getattr(self.loader, "sampler", None), batches, getattr(batches, "sampler", None))
        told = next((each for each in places if hasattr(each, "set_epoch")), None)
        if told is not None:
            # From where it is: whoever resumes has set it, and a count of our own would go back.
            self._epoch = getattr(told, "epoch", self._epoch) + 1
            told.set_epoch(self._epoch)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # raises as the loader's own would


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    rank: int,
    world: int,
    drop_last: bool,
    pin_memory: bool,
    shuffle: bool = True,
    sampler: Sampler[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
) -> DataLoader[Any]:
    """A loader of this rank's micro-batches.

    Args:
        dataset: map-style ones are dealt out to the ranks; an iterable one deals itself out.
        batch_size: samples of a micro-batch.
        rank: of this process among those that share the data.
        world: how many they are.
        drop_last: whether a last batch that is not full is left out.
        pin_memory: in page-locked memory.
        shuffle: whether a map-style data set is; with a seed that all ranks share.
        sampler: in place of the one that deals out.
        collate_fn: makes a batch of samples.
        workers: processes that load.

    Raises:
        TypeError: it is no data set.
    """
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise TypeError(f"training_data is a {type(dataset).__name__}; expected a torch.utils.data.Dataset")
    # An iterable one has no length to divide: each rank's must give what is its own.
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=shuffle)
    # torch refuses to shuffle beside a sampler, which has done that here.
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=workers,
        drop_last=drop_last,
        pin_memory=pin_memory,
    )
