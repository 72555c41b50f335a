"""Data loaders that yield one rank's part of a data set in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

__all__ = ["RepeatingLoader", "make_loader"]

_T = TypeVar("_T")


class RepeatingLoader(Generic[_T]):
    """An endless iterator over a data loader, for training loops that count steps instead of epochs.

    At the end of each round the epoch is increased by 1 and passed to ``set_epoch`` of the loader or of its sampler, if
    there is such a method, so that each round has another order.

    Args:
        loader: iterable of batches; each ``iter(loader)`` must start from the beginning.

    Raises:
        RuntimeError: ``loader`` yields no batch in a whole round; raised by ``next()``.
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
                "the loader yields no batch; RepeatingLoader would look for the first one forever"
            ) from None

    def _next_epoch(self) -> None:
        # Without set_epoch a DistributedSampler repeats the same order. The loader's own set_epoch comes first, because
        # it reaches all samplers of the loader. The batch sampler is searched too: a DataLoader made with one has only
        # a placeholder as ``sampler``.
        batches = getattr(self.loader, "batch_sampler", None)
        places = (self.loader, getattr(self.loader, "sampler", None), batches, getattr(batches, "sampler", None))
        told = next((each for each in places if hasattr(each, "set_epoch")), None)
        if told is not None:
            # Count on from the sampler's epoch. A resumed run may have set it, and a count from 0 would go back.
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
    """Return a data loader of this rank's micro-batches.

    Args:
        dataset: data set. A map-style data set is divided among the ranks. An ``IterableDataset`` must yield only this
            rank's samples.
        batch_size: samples per micro-batch.
        rank: rank of this process among the processes that share the data.
        world: number of processes that share the data.
        drop_last: True to drop a last batch that has fewer than ``batch_size`` samples.
        pin_memory: True to put batches into page-locked memory.
        shuffle: True to shuffle a map-style data set, with the same seed on every rank.
        sampler: sampler to use instead of the ``DistributedSampler`` that divides a map-style data set.
        collate_fn: function from a list of samples to a batch; None for torch's default.
        workers: number of worker processes that load samples.

    Raises:
        TypeError: ``dataset`` has neither ``__getitem__`` nor ``__iter__``.
    """
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise TypeError(f"training_data is a {type(dataset).__name__}; expected a torch.utils.data.Dataset")
    # An IterableDataset has no indices that a sampler could divide, so it gets none.
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=shuffle)
    # ``shuffle`` is not passed on: DataLoader refuses it beside a sampler, and DistributedSampler shuffles already.
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=workers,
        drop_last=drop_last,
        pin_memory=pin_memory,
    )
