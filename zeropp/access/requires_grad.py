"""Changes of ``requires_grad`` after wrapping.

A parameter that is no longer trained stays in its trainable buffer, as it stays in a torch optimizer: nothing waits for
its gradient. One that is trained from now on leaves its buffer, which has no gradient: it has a main weight and a
gradient then. Both happen when the next forward begins, on all ranks together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from zeropp._compat import unguarded
from zeropp.access.state import gather_codes, gather_main
from zeropp.comm.agreement import TRAINED
from zeropp.engine.engine import Engine
from zeropp.engine.preconditions import EVERYTHING
from zeropp.engine.rehearsal import rehearse, warn_of_no_room
from zeropp.params.coded_buffer import CodedBuffer
from zeropp.params.guard import own_dtype
from zeropp.params.unit import FlatBuffer, Unit

__all__ = ["Trainability"]

_SETS = 32  # sets of trained parameters whose backwards are remembered


class Trainability:
    """Brings an engine in line with ``requires_grad`` of its parameters.

    Attributes:
        complex: complex parameters by name. They are part of no unit, so no guard reports their flags.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self.complex = {name: p for name, p in model.named_parameters() if own_dtype(p).is_complex}
        # A number is part of the kind of a backward. None is given twice, or what was learned for one set would be
        # followed for another.
        self._numbers: dict[frozenset[str], int] = {frozenset(): 0}  # of sets of parameters no longer trained
        self._last = 0

    def refuse_complex(self) -> None:
        """Refuse a forward that would make graphs of complex parameters.

        Raises:
            RuntimeError: one is to be trained; no gradient of it would be reduced.
        """
        for name, parameter in self.complex.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} is complex, and requires_grad was set after wrapping; it would not be "
                    "trained. Take that back, and train its real view, torch.view_as_real, in a model wrapped anew"
                )

    # What is made here is trained, whatever the caller is about.
    @torch.inference_mode(False)
    def apply(self) -> bool:
        """Take over the changes of ``requires_grad`` since the last call; called only if there are any. Collective.

        Returns:
            Whether parameters have moved to other buffers.

        Raises:
            RuntimeError: ranks want different parameters to be trained; nothing has changed then.
        """
        engine = self._engine
        engine.parking.require("taking over requires_grad_()", EVERYTHING)
        with unguarded():
            wanted = {n: p.requires_grad for b in engine.buffers for n, p in zip(b.names, b.parameters, strict=True)}
        # Before the first change, so that a disagreement leaves every rank as it was.
        self._check_same(wanted)
        changed = [(unit, b) for unit in engine.units for b in unit.buffers if _flags(b) != _wanted(b, wanted)]
        unfrozen = [(unit, buffer) for unit, buffer in changed if not buffer.trainable]
        if unfrozen:
            # Gathers and refreshes on their way write to what is about to be freed.
            engine.release_prefetched()
            engine.wait_for_refresh()
            # What is trained takes space, which a disk may not have.
            with engine.agreement.watching("making room for parameters that are unfrozen"):
                for unit, buffer in unfrozen:
                    self._split(unit, buffer, wanted)
        if unfrozen or len(self._numbers) > _SETS:
            self._numbers.clear()
            # Learned for fewer parameters, or for too many sets of them.
            engine.forget_learned(backwards=True)
        for _, buffer in changed:
            if buffer.gradient is not None:
                buffer.gradient.trained = _wanted(buffer, wanted)
        frozen = frozenset(name for buffer in engine.trainable_buffers for name in buffer.names if not wanted[name])
        if frozen not in self._numbers:
            self._last += 1
            self._numbers[frozen] = self._last
            # Ranks also learn with a forward where its backward may come back to, and that has changed.
            engine.forget_learned(forwards=True)
        self._tell(self._numbers[frozen], dict.fromkeys(unit for unit, _ in changed), split=bool(unfrozen))
        return bool(unfrozen)

    def _tell(self, number: int, units: Iterable[Unit], *, split: bool) -> None:
        """Let every part of the engine know that other parameters of ``units`` are trained.

        Args:
            number: of the set of trained parameters.
            units: those whose parameters have changed.
            split: some have other buffers now.
        """
        engine = self._engine
        engine.note_trained(number, units, split=split)
        # New buffers have never been gathered: what is cached of them has yet to be made.
        if split:
            warn_of_no_room(engine.comm, len(engine.unit_of))
            rehearse(engine)
            engine.start_refresh()

    def _check_same(self, wanted: dict[str, bool]) -> None:
        engine = self._engine
        doing = "changing which parameters are trained"
        # A number is enough while all agree; the tables travel only to name what differs.
        code = zlib.crc32(repr(wanted).encode())
        rows = engine.agreement.exchange(TRAINED, [code], doing, "requires_grad_()")
        if all(row == rows[0] for row in rows):
            return
        tables = engine.agreement.exchange_objects(wanted, doing)
        name, rank = next((n, r) for r, table in enumerate(tables) for n in wanted if table[n] != tables[0][n])
        raise RuntimeError(
            f"ranks 0 and {rank} disagree whether {name!r} is trained: requires_grad is {tables[0][name]} and "
            f"{tables[rank][name]}. Call requires_grad_ with the same value on every rank; nothing has changed yet"
        )

    def _split(self, unit: Unit, buffer: FlatBuffer, wanted: dict[str, bool]) -> None:
        """Move what is to be trained out of a buffer without a gradient; what stays is laid out anew without it."""
        engine = self._engine
        values = gather_main(engine, buffer)
        codes = gather_codes(engine, buffer)
        parts = []
        # Trainable parameters last: positions of those that were trained before must not move.
        for trainable in (False, True):
            indices = [index for index, name in enumerate(buffer.names) if wanted[name] is trainable]
            if indices:
                part = engine.maker.part(buffer, indices, trainable=trainable)
                # Graphs made before know the old storage. See [Note: versions].
                part.version = buffer.version + 1
                part.shard_from(_copier(part, [values[index] for index in indices]))
                if isinstance(part, CodedBuffer) and codes is not None:
                    part.adopt_codes(buffer, codes)
                parts.append(part)
        # Before the parts come in: those in front have their hooks already.
        first = len(unit.trained)
        unit.replace(buffer, parts)
        engine.watch_gradients(unit, first)


def _flags(buffer: FlatBuffer) -> tuple[bool, ...]:
    return buffer.gradient.trained if buffer.gradient is not None else (False,) * len(buffer.names)


def _wanted(buffer: FlatBuffer, wanted: dict[str, bool]) -> tuple[bool, ...]:
    return tuple(wanted[name] for name in buffer.names)


def _copier(buffer: FlatBuffer, values: list[Tensor]) -> Callable[[Tensor], None]:
    def fill(whole: Tensor) -> None:
        for view, value in zip(buffer.layout.views(whole), values, strict=True):
            view.copy_(value)

    return fill
