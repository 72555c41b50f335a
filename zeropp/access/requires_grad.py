"""Changes of ``requires_grad`` after wrapping.

A parameter that is frozen stays in its trainable flat buffer, as it stays in a PyTorch optimizer; reductions no longer
wait for its gradient. A parameter that is unfrozen moves from its frozen flat buffer to a new trainable one, which has
main weights and a gradient shard. Both changes take effect at the start of the next forward, on all ranks together.
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
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.guard import own_dtype
from zeropp.params.unit import Unit

__all__ = ["Trainability"]

_SETS = 32  # largest number of sets of trained parameters whose backward orders are stored


class Trainability:
    """Applies changes of the parameters' ``requires_grad`` to an engine.

    Attributes:
        complex: complex parameters by name. They belong to no unit, so no guard reports changes of their flags.
    """

    def __init__(self, engine: Engine, model: nn.Module) -> None:
        self._engine = engine
        self.complex = {name: p for name, p in model.named_parameters() if own_dtype(p).is_complex}
        # Set of frozen parameters (names) -> its number. The number is part of the key of a backward's learned order.
        # Numbers are never reused: otherwise an order learned for one set would be followed for another.
        self._numbers: dict[frozenset[str], int] = {frozenset(): 0}
        self._last = 0

    def refuse_complex(self) -> None:
        """Check before a forward that no complex parameter requires a gradient.

        Raises:
            RuntimeError: a complex parameter requires a gradient, which zeropp would not reduce.
        """
        for name, parameter in self.complex.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} is complex, and requires_grad was set after wrapping; it would not be "
                    "trained. Take that back, and train its real view, torch.view_as_real, in a model wrapped anew"
                )

    # The new buffers are trained, so they must be normal tensors even if the caller is in inference mode.
    @torch.inference_mode(False)
    def apply(self) -> bool:
        """Apply the changes of ``requires_grad`` since the last call. Call it only if there are changes. Collective.

        Returns:
            True if parameters have moved to other flat buffers.

        Raises:
            RuntimeError: ``requires_grad`` differs between ranks. The engine is unchanged then.
        """
        engine = self._engine
        engine.parking.require("taking over requires_grad_()", EVERYTHING)
        with unguarded():
            wanted = {n: p.requires_grad for b in engine.buffers for n, p in zip(b.names, b.parameters, strict=True)}
        # Compare over ranks before the first change, so that the error leaves all ranks unchanged.
        self._check_same(wanted)
        changed = [(unit, b) for unit in engine.units for b in unit.buffers if _flags(b) != _wanted(b, wanted)]
        unfrozen = [(unit, buffer) for unit, buffer in changed if not buffer.trainable]
        if unfrozen:
            # Gathers and refreshes in flight write to buffers that _split frees.
            engine.release_prefetched()
            engine.wait_for_refresh()
            # With NVMe offload, new main weights and states may not fit the disk. `watching` reports such an error to
            # the other ranks.
            with engine.agreement.watching("making room for parameters that are unfrozen"):
                for unit, buffer in unfrozen:
                    self._split(unit, buffer, wanted)
        if unfrozen or len(self._numbers) > _SETS:
            self._numbers.clear()
            # The stored orders of backwards belong to fewer trained parameters, or there are too many sets.
            engine.forget_learned(backwards=True)
        for _, buffer in changed:
            if buffer.gradient is not None:
                buffer.gradient.trained = _wanted(buffer, wanted)
        frozen = frozenset(name for buffer in engine.trainable_buffers for name in buffer.names if not wanted[name])
        if frozen not in self._numbers:
            self._last += 1
            self._numbers[frozen] = self._last
            # A forward's record contains the units that its backward may reach, and these have changed.
            engine.forget_learned(forwards=True)
        self._tell(self._numbers[frozen], dict.fromkeys(unit for unit, _ in changed), split=bool(unfrozen))
        return bool(unfrozen)

    def _tell(self, number: int, units: Iterable[Unit], *, split: bool) -> None:
        """Notify the engine about the new set of trained parameters, and set up new flat buffers.

        Args:
            number: number of the set of frozen parameters.
            units: units with changed parameters.
            split: True if some units have new flat buffers.
        """
        engine = self._engine
        engine.note_trained(number, units, split=split)
        # New buffers need their first refresh, because nothing is cached for them yet. Rehearse new communicators
        # before that.
        if split:
            warn_of_no_room(engine.comm, len(engine.unit_of))
            rehearse(engine)
            engine.start_refresh()

    def _check_same(self, wanted: dict[str, bool]) -> None:
        engine = self._engine
        doing = "changing which parameters are trained"
        # Compare a checksum. Only if it differs, exchange the tables to name a parameter that differs.
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
        """Replace a frozen flat buffer by a smaller frozen one and a trainable one with the unfrozen parameters."""
        engine = self._engine
        values = gather_main(engine, buffer)
        codes = gather_codes(engine, buffer)
        parts = []
        # Add the trainable part last, so that the positions of the parameters that were already trained do not change.
        for trainable in (False, True):
            indices = [index for index, name in enumerate(buffer.names) if wanted[name] is trainable]
            if indices:
                part = engine.maker.part(buffer, indices, trainable=trainable)
                # Graphs from before the split refer to the old storage. A higher version makes autograd raise for them.
                # See [Note: versions].
                part.version = buffer.version + 1
                part.shard_from(_copier(part, [values[index] for index in indices]))
                if isinstance(part, CodedBuffer) and codes is not None:
                    part.adopt_codes(buffer, codes)
                parts.append(part)
        unit.replace(buffer, parts)
        engine.watch_gradients(unit)


def _flags(buffer: FlatBuffer) -> tuple[bool, ...]:
    return buffer.gradient.trained if buffer.gradient is not None else (False,) * len(buffer.names)


def _wanted(buffer: FlatBuffer, wanted: dict[str, bool]) -> tuple[bool, ...]:
    return tuple(wanted[name] for name in buffer.names)


def _copier(buffer: FlatBuffer, values: list[Tensor]) -> Callable[[Tensor], None]:
    def fill(whole: Tensor) -> None:
        for view, value in zip(buffer.layout.views(whole), values, strict=True):
            view.copy_(value)

    return fill
