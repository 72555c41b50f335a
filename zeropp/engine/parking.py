"""What of a rank's memory is off its device between two phases, and who must not come for it meanwhile.

[Note: states off the device] Between training phases something else wants the device: rollouts, an evaluation. What is
not needed then is parked by its name (`zeropp.offload.parked`): storages stay and lose their memory, so that every view
is right again afterwards. All ranks park and bring back the same names together, so that none waits for another that
is refused. Whoever comes between says what it needs (`Engine.require_idle`), and is refused before it changes or sends
anything. Whole weights can be read all the same, since gathering them may begin with the bytes on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from zeropp._compat import storage_id, unguarded
from zeropp.offload.parked import Parked
from zeropp.params.guard import make_readable, make_unreadable

__all__ = ["COMPUTING", "EVERYTHING", "KINDS", "NOTHING", "TRAINING", "WEIGHTS", "Parking", "of_a_forward"]

KINDS = {
    "optim_states": "optimizer states",
    "hp_params": "main weights",
    "lp_params": "weights that passes begin with",
    "lp_grads": "gradients",
    "carried_errors": "carried errors",
}
"""What each name stands for; all but the last name are DeepSpeed's."""

NOTHING: frozenset[str] = frozenset()
COMPUTING = frozenset(["lp_params"])
TRAINING = frozenset(["lp_params", "lp_grads", "carried_errors"])
WEIGHTS = frozenset(["hp_params", "lp_params"])
EVERYTHING = frozenset(KINDS)


def of_a_forward() -> frozenset[str]:
    """What a forward needs that begins here."""
    return TRAINING if torch.is_grad_enabled() else COMPUTING


class Parking:
    """Parked memory of one engine, by name; see [Note: states off the device].

    Attributes:
        kinds: names of which something is away on any rank, and until all ranks have it back.
    """

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self._parked: dict[str, list[Parked]] = {}
        self._by_storage: dict[int, Parked] = {}
        # Weakly: what is dropped meanwhile is dropped.
        self._unreadable: dict[str, list[weakref.ref[Tensor]]] = {}

    def park(
        self, kind: str, tensor: Tensor, views: Sequence[Tensor], *, keep: bool, pinned: bool, non_blocking: bool
    ) -> None:
        """Give back the memory under a tensor; see :class:`Parked`.

        Args:
            kind: its name in ``KINDS``.
            tensor: over all of the storage.
            views: others of it that somebody holds, and might read.
            keep: whether its bytes matter.
            pinned: see :class:`Parked`.
            non_blocking: see :class:`Parked`.
        """
        # Before the tensor refuses to be asked.
        place = storage_id(tensor)
        parked = Parked(tensor, keep=keep, pinned=pinned, non_blocking=non_blocking)
        # From here on it is away, whatever becomes of the rest.
        self.kinds.add(kind)
        self._by_storage[place] = parked
        self._parked.setdefault(kind, []).append(parked)
        # The first is the engine's own: a use that nobody thought of raises, too, and does not end the process.
        for each in (tensor, *views):
            make_unreadable(each, f"of {KINDS[kind]} ({kind}), {_WHERE}")
            self._unreadable.setdefault(kind, []).append(weakref.ref(each))

    def is_away(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory has been given back."""
        with unguarded():
            return bool(self._by_storage) and storage_id(tensor) in self._by_storage

    def values(self, tensor: Tensor) -> Tensor:
        """A tensor's values, to read: itself, or those on the host."""
        return self._by_storage[storage_id(tensor)].copy_of(tensor) if self.is_away(tensor) else tensor

    def bring_back(self, *, non_blocking: bool) -> None:
        """Bring back everything; ``kinds`` are cleared when other ranks have theirs.

        Raises:
            torch.OutOfMemoryError: the device has no room. What is back is back, and this can be called again.
        """
        for kind in list(self._parked):
            # One by one, noted at once: there may be no room for the next.
            while self._parked[kind]:
                self._parked[kind][-1].bring_back(non_blocking=non_blocking)
                parked = self._parked[kind].pop()
                self._by_storage = {place: other for place, other in self._by_storage.items() if other is not parked}
            # Not before the last storage: a slice and its gradient, say, are read together.
            for ref in self._unreadable.pop(kind, ()):
                if (tensor := ref()) is not None:
                    make_readable(tensor)
            del self._parked[kind]

    def require(self, what: str, needs: Collection[str]) -> None:
        """Refuse something that needs what is away.

        Raises:
            RuntimeError: with what to call.
        """
        # Asked by every forward, for which nearly always nothing is away.
        if not self.kinds:
            return
        away = [f"{words} ({kind})" for kind, words in KINDS.items() if kind in self.kinds and kind in needs]
        if away:
            raise RuntimeError(f"{what} needs {', '.join(away)}, {_WHERE}")


_WHERE = "off the device since optimizer.offload_states(); call optimizer.reload_states() first, on every rank"
