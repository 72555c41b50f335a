"""The two small reductions around an optimizer step, and the one host read.

After the last backward one number tells every rank whether all gradients are finite, before torch's GradScaler looks.
In ``step`` one vector carries the squared gradient norm, which parameters were used anywhere, which units still have
unsent gradients on some rank, whether all ranks issued the same collectives and have the same settings, and now and
then whether they cache the same weights.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zeropp.comm.agreement import SETTINGS
from zeropp.engine.cache_checksum import CacheChecksum
from zeropp.engine.engine import Engine
from zeropp.params.gradient import Gradient
from zeropp.wire.report import Report
from zeropp_kernels.reference import squared_norm

__all__ = ["Boundary", "Settings", "Verdict"]

_Code = TypeVar("_Code", int, Tensor)

_log = logging.getLogger("zeropp")

# The square of a hash has 48 bits, and sums of it over more than 32 ranks are not exact in float64. So it is summed in
# two halves.
_HALF = 4096
_BAD = 1  # shards that are not finite
_EDITED = 2  # ranks whose gradients were changed after the last backward
_HASH = slice(3, 6)  # of what was issued, see _spread
_SETTINGS = slice(6, 9)  # of the optimizer's
_ROUNDING = 1e-6  # between two orders of adding up squares in float32


@dataclass(frozen=True)
class Verdict:
    """What every rank knows after the reduction.

    Attributes:
        norm: gradient norm over the whole model, all ranks; not finite if any gradient is.
        used: for each unit, whether each trainable parameter had a gradient on any rank since the last zero_grad.
    """

    norm: float
    used: list[list[bool]]

    @property
    def finite(self) -> bool:
        """Whether every gradient is finite."""
        # False of Inf and NaN alike: the difference is NaN then.
        return self.norm - self.norm == 0.0


class Settings(Protocol):
    """Numbers that every rank steps with, seen from here."""

    def code(self) -> int | Tensor:
        """24 bits of a hash, on the host or on the device."""
        ...

    def disagreement(self) -> RuntimeError:
        """The error when hashes differ. Collective."""
        ...


class Boundary:
    """Assembles, sums and reads the vector.

    Attributes:
        reads: how many times numbers were read on the host; once a step, more often where gradients were unsent.
        cache_checksum: compares what ranks cache.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self._settings = settings
        self.reads = 0
        self.cache_checksum = CacheChecksum(engine)
        self._vector: Tensor | None = None
        self._verdict: Verdict | None = None
        self._doubts = False  # all gradients that have arrived are in doubt
        # Places in the vector, behind the square of the norm and what is named above: a flag for each unit with unsent
        # gradients, one for strays among these, one for ranks that passed over units, one for each used parameter;
        # checksums at the end.
        self._unsent = _SETTINGS.stop
        self._stray = self._unsent + len(engine.units)
        self._passed_over = self._stray + 1
        self._used = self._passed_over + 1

    def invalidate(self) -> None:
        """Forget; gradients have changed."""
        self._vector, self._verdict = None, None
        self._doubts = False

    def doubt(self) -> None:
        """Somebody has been given the groups, and with them gradients to write to: torch's GradScaler, or the user."""
        if not self._doubts:
            self._doubts = True
            for gradient in self._arrived():
                gradient.doubt()

    def spread_overflow(self, target: Tensor, source: Gradient | None) -> None:
        """Let every rank's gradients show that some rank's are not finite; on a card, nothing waits.

        torch's GradScaler looks at this rank's gradients alone and must come to the same answer everywhere, before the
        vector is exchanged in ``step``: it may still scale them.

        Args:
            target: one gradient that the optimizer sees on this rank; gains 0, or NaN.
            source: whose view that is.
        """
        gradients = self._arrived()
        for gradient in gradients:
            gradient.measure()
        # A NaN survives the sum and the addition, and zero changes nothing: no branch, so the host need not know.
        bad = Report.total([gradient.report for gradient in gradients], self.engine.device)[1]
        flag = torch.where(bad == 0, 0.0, torch.nan)
        with self.engine.agreement.watching("sharing whether gradients are finite", where="a backward"):
            self.engine.comm.sum(flag)
        # GradScaler looks at every gradient it is shown, so one spoiled element of one of them is enough.
        target[:1] += flag.to(target.dtype)
        if source is not None:
            # Where the NaN comes from, the report says so, and one rank's is enough for all.
            source.accept_edits()

    def verdict(self) -> Verdict:
        """The result, once per step; all that waits for the device is in here.

        Raises:
            RuntimeError: the ranks did not issue the same collectives.
        """
        if self._verdict is None:
            values = self._exchange()
            # Each turn sends, on every rank, what some rank still had: see [Note: stray gradients]. The norm counts
            # only once nothing is left to send.
            spoiled = False
            while unsent := self._unsent_units(values):
                # Summed, since an edit on one rank alone must make all of them skip. GradScaler has changed gradients
                # that are not finite, too, and with those the step is skipped anyway.
                if values[_EDITED] > 0 and values[_BAD] == 0:
                    self._refuse_edited(unsent)
                    spoiled = True
                # Without strays all of it was held on purpose, by no_sync() or a window, and no order was at fault.
                self.engine.schedule.postpone(unsent, held=values[self._stray] == 0)
                for index in unsent:
                    self.engine.reductions.send_unsent(index)
                values = self._exchange()
            # The sum is the same everywhere, so all ranks go in here or none does. A step that is skipped needs no
            # clean norm.
            if math.isfinite(values[0]) and self._clear_unused(values):
                values = self._exchange()
            self._renew_differing_caches(values)
            self.engine.schedule.note_passed_over(values[self._passed_over] > 0)
            # A norm that is not finite is how every rank is told to skip.
            self._verdict = self._interpret([math.nan, *values[1:]] if spoiled else values)
        return self._verdict

    def check_settings(self) -> None:
        """Before a step that goes by a sum of earlier, as after clipping: settings may have changed since. Collective.

        Raises:
            RuntimeError: they differ between ranks.
        """
        if self._verdict is not None:
            # Without a verdict the sum that is to come carries the settings, and no message of their own is needed.
            doing = "comparing the settings of parameter groups"
            rows = self.engine.agreement.exchange(SETTINGS, [int(self._settings.code())], doing)
            if any(row != rows[0] for row in rows):
                raise self._settings.disagreement()

    def _renew_differing_caches(self, values: list[float]) -> None:
        """Renew what is cached, from main weights alone, if ranks that cache the same weights have other bits."""
        used = sum(len(flags) for flags in self.engine.pending.used)
        if self.cache_checksum.due and self.cache_checksum.differ(values[self._used + used :]):
            _log.warning(
                "ranks that cache the same weights have different bits of them, perhaps since a fault of memory or of "
                "a link; they are renewed from the main weights. Up to %d steps were computed with them",
                self.cache_checksum.every,
            )
            self.engine.comm.ledger.note("<boundary>", "cached weights differ between ranks")
            self.engine.refresh.invalidate()
        self.cache_checksum.count_step()

    def _refuse_edited(self, unsent: list[int]) -> None:
        """Say that what is unsent cannot be added to what torch's GradScaler, or the user, has changed on some rank."""
        _log.warning(
            "gradients of units %s came in another order than before, after the others had been scaled; this step "
            "is skipped, and they are waited for from now on",
            [self.engine.units[index].name for index in unsent],
        )

    def _clear_unused(self, values: list[float]) -> bool:
        """Zero what carried errors have brought to parameters that no rank has used; the same answer everywhere."""
        found = False
        for unit, used in zip(self.engine.units, self._flags(values), strict=True):
            flags = iter(used)
            for gradient in unit.gradients:
                unused = [not next(flags) and trained for trained in gradient.trained]
                # Without feedback nothing can arrive for a parameter that no rank has used.
                if gradient.feedbacks and gradient.arrived and any(unused):
                    gradient.clear(unused)
                    found = True
        return found

    def accept_scaling(self, factor: Tensor) -> None:
        """The wrapper multiplied all gradients by ``factor``: the norm follows, the verdict stays."""
        assert self._vector is not None
        # The vector holds the square. A step that clips by the configuration, too, reads the norm from here.
        self._vector[0] *= factor.square()

    def _exchange(self) -> list[float]:
        edited = self._measure_doubted()
        values = self._add_up(edited)
        if not math.isfinite(values[0]) and values[_BAD] == 0:
            # Squares of large finite values pass float32; all ranks see that, and do it again.
            values = self._add_up(edited, exact=True)
        return values

    def _add_up(self, edited: Tensor, *, exact: bool = False) -> list[float]:
        self._vector = self._assemble(edited, exact)
        with self.engine.agreement.watching("adding up norms and flags", where="step()"):
            self.engine.comm.sum(self._vector)
        return self._read(self._vector)

    def _arrived(self) -> list[Gradient]:
        return [gradient for gradient in self.engine.gradients if gradient.arrived]

    def norm_tensor(self) -> Tensor:
        """The norm as a scalar on the model's device; after :meth:`verdict`."""
        assert self._vector is not None
        return _rounded(self._vector[0].sqrt())

    def _measure_doubted(self) -> Tensor:
        """Renew reports; float64 [1], 1 if gradients were changed after the last backward."""
        doubted = [gradient for gradient in self._arrived() if gradient.doubted]
        if not doubted:
            return torch.zeros(1, dtype=torch.float64, device=self.engine.device)
        # A version that has risen is a proof. Without one only scaling is looked for, which is GradScaler's.
        edited = any(gradient.edited for gradient in doubted)
        reports = [gradient.report for gradient in doubted]
        before = Report.total(reports, self.engine.device)[0]
        for gradient in doubted:
            gradient.measure()
        # A kernel and a pass of its own may add in another order.
        scaled = (Report.total(reports, self.engine.device)[0] - before).abs() > _ROUNDING * before
        return torch.where(scaled, 1.0, float(edited)).to(torch.float64)[None]

    def _measure(self, exact: bool) -> Tensor:
        """float64 [2]: the square of this rank's part of the norm, and how many of its shards are not finite."""
        # Replicas hold the same sums; the first one's count.
        gradients = [gradient for gradient in self._arrived() if gradient.placement.replica == 0]
        found = Report.total([gradient.report for gradient in gradients], self.engine.device)
        if exact and gradients:
            found[0] = squared_norm([gradient.shard for gradient in gradients])
        return found

    def _assemble(self, edited: Tensor, exact: bool) -> Tensor:
        engine = self.engine
        settings = self._settings.code()
        flags: list[float] = [*_spread(engine.issued.value)]
        flags += _spread(settings) if isinstance(settings, int) else [0.0] * 3
        flags += [float(any(g.has_unsent() for g in unit.gradients)) for unit in engine.units]
        flags.append(float(any(g.has_stray() for g in engine.gradients)))
        flags.append(float(engine.schedule.passed_over))
        flags += [float(used) for unit_flags in engine.pending.used for used in unit_flags]
        # Pinned, so that the copy is queued and not waited for. torch's allocator keeps the block until the copy is
        # done.
        host = torch.tensor(flags, dtype=torch.float64, pin_memory=engine.device.type == "cuda")
        parts = [self._measure(exact), edited, host.to(engine.device, non_blocking=True)]
        if self.cache_checksum.due:
            # A refresh under way is still writing what the checksums are of.
            engine.refresh.wait()
            parts.append(self.cache_checksum.sums())
        vector = torch.cat(parts)
        if isinstance(settings, Tensor):
            # Settings that live on a card are hashed there: to read them would be a second wait for the device.
            vector[_SETTINGS] = torch.stack(_spread(settings)).to(vector)
        return vector

    def _read(self, vector: Tensor) -> list[float]:
        """The one place that reads numbers on the host."""
        self.reads += 1
        if vector.device.type == "cuda":
            host = vector.to("cpu", non_blocking=True)
            # A plain tolist() would wait in the driver for ever if a rank never came; an event can be asked, and given
            # up.
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(vector.device))
            self.engine.agreement.wait(lambda timeout: _poll(event, timeout), "waiting for the sum of norms and flags")
        else:
            host = vector
        values: list[float] = host.tolist()
        return values

    def _unsent_units(self, values: list[float]) -> list[int]:
        self._check_in_step(values)
        return [unit.index for unit in self.engine.units if values[self._unsent + unit.index] > 0]

    def _check_in_step(self, values: list[float]) -> None:
        if self._disagree(values[_HASH]):
            raise self.engine.agreement.failure(
                f"comparing what was gathered and reduced, hash {self.engine.issued.value:x}", where="step()"
            )
        if self._disagree(values[_SETTINGS]):
            raise self._settings.disagreement()

    def _disagree(self, numbers: list[float]) -> bool:
        """Whether numbers of a hash, summed over ranks, come from different hashes: n * sum(x * x) > sum(x) ** 2."""
        world = self.engine.comm.world
        # In Python's integers, which do not round. Equality in the inequality of Cauchy and Schwarz means that all
        # ranks have one hash. A fake backend does not sum at all.
        total, squares = int(numbers[0]), int(numbers[1]) * _HALF + int(numbers[2])
        return world * squares != total * total and self.engine.comm.backend != "fake"

    def _interpret(self, values: list[float]) -> Verdict:
        return Verdict(_rounded(torch.tensor(values[0], dtype=torch.float64).sqrt()).item(), self._flags(values))

    def _flags(self, values: list[float]) -> list[list[bool]]:
        """For each unit, which parameters any rank has used."""
        flags = iter(values[self._used :])
        return [[next(flags) > 0 for _ in unit_flags] for unit_flags in self.engine.pending.used]


def _spread(code: _Code) -> list[_Code]:
    """A hash, and its square in two halves, in the order of the vector."""
    return [code, code * code // _HALF, code * code % _HALF]


def _rounded(norm: Tensor) -> Tensor:
    """A norm to 40 bits, which no order of summation changes: how units are cut must not show in clipped gradients."""
    mantissa, exponent = torch.frexp(norm)
    return torch.ldexp(torch.round(mantissa * 2.0**40) / 2.0**40, exponent)


def _poll(event: torch.cuda.Event, timeout: float) -> bool:
    until = time.monotonic() + timeout
    while not event.query():
        if time.monotonic() > until:
            return False
        time.sleep(2e-5)
    return True
