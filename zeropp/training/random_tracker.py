"""Random numbers from several named sequences, as models made for Megatron draw them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["RandomTracker", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"]

_NAME = "model-parallel-rng"


class RandomTracker:
    """Sequences of random numbers beside the default one: that of this rank's GPU, or of the CPU without one."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Forget all sequences."""
        self._states = {}

    def get_states(self) -> dict[str, Tensor]:
        """The state of each sequence, uint8, by its name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Go on from these states alone."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a sequence.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self._states:
            raise ValueError(f"there is a sequence {name!r} already; choose another name, or reset() before")
        before = _state()
        # A generator of its own would not do: dropout draws from the default one alone.
        _seed(seed)
        self._states[name] = _state()
        _set_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _NAME) -> Iterator[None]:
        """Draw from a sequence inside, and from the default one again after it.

        Raises:
            KeyError: there is none of this name.
        """
        if name not in self._states:
            raise KeyError(f"there is no sequence {name!r}; call model_parallel_cuda_manual_seed(seed), or add it")
        before = _state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _set_state(before)


def _state() -> Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    (torch.cuda.set_rng_state if torch.cuda.is_available() else torch.set_rng_state)(state)


def _seed(seed: int) -> None:
    # torch.manual_seed would seed both.
    (torch.cuda.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)


_tracker = RandomTracker()


def get_cuda_rng_tracker() -> RandomTracker:
    """The one of this process; recomputation draws from its sequences what forward did."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default sequence, and begin the one that ``fork()`` draws from.

    Args:
        seed: of the default one. The other's is 2718 more, as on the first of several model-parallel ranks.
    """
    _tracker.reset()
    _seed(seed)
    # Beside it, so that no two sequences of neighbouring seeds are the same.
    _tracker.add(_NAME, seed + 2718)
