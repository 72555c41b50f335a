"""The step sync: the small reduction of each optimizer step, the host's read of it, and a flag for torch's GradScaler.

After the last backward, one number shows every rank if all gradients are finite, before torch's GradScaler checks. In
``step``, one vector is summed over the ranks. It carries the squared gradient norm, the used mask, flags of units with
unsent gradients, hashes of the issued collectives and of the settings, flags of missed weight edits, and, at intervals,
checksums of the cached weights. This file assembles, sums, reads and evaluates that vector. :class:`StepStats` is the
result.

[Note: sums read late] If no number in the vector can change the work that the host queues next, the host does not wait
for the sum. The device decides if the step is skipped. The host reads the vector at the next step, or when a user asks
for the result. This requires one rank or ``static_graph``, and a fused Adam, which obeys ``found_inf``. It excludes
differences and error feedback, which cannot skip a step without side effects. A rank must also have used all trained
parameters and sent all gradients. Otherwise that rank waits for the sum, which shows if other ranks went on without it.
If they did, the rank goes on, too, and checks the sum at the time when they check it.

[Note: equality by sums] The sums of a number and of its square over the ranks show if all ranks have the same number:
``n * sum(x * x) >= sum(x) ** 2``, with equality only if all ``x`` are equal (Cauchy-Schwarz). So hashes and checksums
travel in the vector, and no rank needs another rank's values.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zeropp.comm.agreement import SETTINGS, Agreement
from zeropp.engine.engine import Engine
from zeropp.params.flat_buffer import FlatBuffer
from zeropp.params.gradient import Gradient
from zeropp.wire.codecs import total_of
from zeropp_kernels.reference import squared_norm

__all__ = [
    "CacheChecksum",
    "PendingSum",
    "StepStats",
    "StepSync",
    "SyncedSettings",
    "differ",
    "differ_on_device",
    "encode_hash",
    "norm_of",
    "rounded",
    "square_over",
]

_log = logging.getLogger("zeropp")

_BAD = 1  # number of shards that are not finite
_EDITED = 2  # number of ranks that edited gradients after the last backward, plus _EARLY * ranks that did before it
_HASH = slice(3, 6)  # hash of the issued collectives, see encode_hash
_SETTINGS = slice(6, 9)  # hash of the optimizer's settings
_LATE = 9  # number of ranks that do not wait for the sum, plus _MISSED * ranks with weight edits that a forward missed
_MISSED = _REMOVED = _EARLY = 2.0**20  # larger than the number of ranks
_HOW_TO_EDIT = (
    "The model computes with weights that all ranks gather together, and a rank that holds no part of what was edited "
    "cannot know of the edit. Edit all tensors of a parameter group in one loop, on every rank; or edit whole "
    "parameters in zeropp.zero.GatheredParameters(parameters, modifier_rank=0)"
)
_ROUNDING = 1e-6  # bound on the relative difference between two summation orders in float32


@dataclass(frozen=True)
class StepStats:
    """The result of the step sync, the same on every rank.

    Attributes:
        norm: gradient norm over the whole model, not finite if any gradient is not; None if the sum is read late.
        used: for each unit, a mask of the trainable parameters that have a gradient from any rank since zero_grad.
        late: True if some rank does not wait for the sum, so that all ranks run the step and the device may skip it.
        checked: True if a step with a non-finite norm is skipped.
        sent: True if gradients had to be reduced first, because they were held or arrived out of order.
    """

    norm: float | None
    used: list[list[bool]]
    late: bool = False
    checked: bool = True
    sent: bool = False

    @property
    def skips(self) -> bool:
        """True if the host skips the step; False also if only the device can decide to skip it."""
        return self.checked and self.norm is not None and not math.isfinite(self.norm)


class SyncedSettings(Protocol):
    """The optimizer's settings, which must be equal on all ranks."""

    def code(self) -> int | Tensor:
        """Return a 24-bit hash, on the host or on the device."""
        ...

    def disagreement(self, *, late: bool = False) -> RuntimeError:
        """Return the error for differing hashes. Collective, but local if ``late``, that is, if the step is over."""
        ...


class StepSync:
    """Assembles, sums and reads the step sync's vector.

    Args:
        engine: engine whose steps are synchronized.
        settings: settings that are compared between ranks.
        checks_overflow: True to skip a step with a non-finite gradient.

    Attributes:
        reads: number of times that the host waited for a sum: usually 1 per step, more if gradients were unsent, 0 if
            late.
        defers_read: True if sums may be read late, which is possible on a GPU only; see [Note: sums read late].
        cache_checksum: comparison of the weights that ranks cache.
        must_skip: True if gradients were edited before others of the same step were reduced. The edit missed the
            others, so all ranks skip the step.
        missed: names of parameters; this rank edited some of them, and a forward computed without the edit.
    """

    def __init__(self, engine: Engine, settings: SyncedSettings, *, checks_overflow: bool) -> None:
        self.engine = engine
        self._settings = settings
        self.reads = 0
        self._checks = checks_overflow
        # On CPU the host cannot run ahead of the device.
        self.defers_read = engine.device.type == "cuda"
        self.cache_checksum = CacheChecksum(engine)
        self.missed: list[str] = []
        self.must_skip = False
        self._edited_early = False  # edits were accepted when a backward began; stray gradients may have missed them
        self._pending_sum: PendingSum | None = None
        self._vector: Tensor | None = None
        self._kept_stats: StepStats | None = None
        self._all_stale = False  # reports of all arrived gradients count as possibly outdated
        self._kept = False  # the result was computed before the step, and the user may have edited gradients since
        # Versions of the arrived gradient shards that the vector describes; None unless the result is kept for the
        # step.
        self._versions: list[int] | None = None
        # Offsets in the vector, after the fixed entries above: flags of units with unsent gradients, a flag for strays
        # among them, ranks that passed over units + _REMOVED * ranks with unreported removals, the used mask, and
        # checksums.
        self._unsent = _LATE + 1
        self._stray = self._unsent + len(engine.units)
        self._passed_over = self._stray + 1
        self._used = self._passed_over + 1

    def invalidate(self) -> None:
        """Discard the result, because gradients have changed."""
        self._vector = None
        self._kept_stats = None
        self._versions = None
        self._all_stale = self._kept = False

    def take_early_edits(self) -> None:
        """Accept gradient edits that were made before the backward that begins now.

        In plain torch such an edit does not affect this backward's gradients, so these may be held, as in
        ``no_sync()``. Gradients that an earlier backward holds have missed the edit. In that case the edit stays
        recorded.
        """
        edited = [gradient for gradient in self._arrived() if gradient.edited]
        if edited and not any(gradient.held is not None for gradient in self.engine.gradients):
            # Until a backward has ended after a step, no rank has unsent gradients that could miss the edit.
            self._edited_early |= self.engine.accumulation.count > 0
            for gradient in edited:
                gradient.measure()

    def forget_early_edits(self) -> None:
        """Forget accepted and missed gradient edits, because the step was decided or the gradients were discarded."""
        self._edited_early = self.must_skip = False

    def mark_stale(self) -> None:
        """Mark all reports as outdated, because GradScaler or the user has the groups and may edit gradients unseen."""
        if not self._all_stale:
            self._all_stale = True
            for gradient in self._arrived():
                gradient.mark_stale()

    def share_overflow(self, target: Tensor, source: Gradient | None) -> None:
        """Add NaN to a shown gradient on every rank if any rank has a non-finite gradient.

        torch's GradScaler checks this rank's gradients only, before ``step`` exchanges the vector. It must reach the
        same decision on all ranks. If gradients are in GPU memory, the host does not wait.

        Args:
            target: a gradient that the optimizer sees on this rank.
            source: gradient whose shard ``target`` is a view of; None for a stand-in.
        """
        gradients, device = self._arrived(), self.engine.device
        for gradient in gradients:
            gradient.measure()
        reports = [gradient.report for gradient in gradients]
        found = total_of(reports, device)
        # A finite sum needs no flags. Reading it is free on a CPU. On a GPU the host would wait, so flags are measured
        # there, unless a kernel has set them.
        if device.type != "cpu" or not math.isfinite(found.tolist()[0]):
            for gradient in gradients:
                gradient.report.measure_flag(gradient.shard)
            found = total_of(reports, device)
        # Send NaN instead of a flag: NaN survives sum and addition, and 0 changes nothing. So the host need not branch.
        flag = torch.where(found[1] == 0, 0.0, torch.nan)
        with self.engine.agreement.watching("sharing whether gradients are finite", where="a backward"):
            self.engine.comm.sum(flag)
        # GradScaler checks all shown gradients, so one NaN element is enough. If ``target`` is in host memory, the host
        # waits.
        target[:1] += flag.to(target)
        if source is not None:
            # The NaN is no edit by the user, so keep the gradient's measured norm and finite flag. The step
            # sync sums the flags of all ranks, and the rank with the non-finite gradient contributes one.
            source.accept_edits()

    def reduce_stats(self, *, late: bool = False) -> StepStats:
        """Return the step's result; the first call sums the vector, and the host may wait for the device.

        Args:
            late: True if the caller uses :meth:`skip_flag` and needs no number on the host.

        Raises:
            RuntimeError: ranks issued different collectives or have different settings, now or at an unread earlier
                step.
        """
        if self._kept_stats is None:
            # First check a sum that clip_grad_norm_ left unread. All ranks have the same sum, so all raise or none.
            self.read_unread()
            if late and self._may_read_late() and self._needs_nothing():
                self._kept_stats = self._sum_unread()
        if self._kept_stats is None:
            values = self._exchange()
            if values[_LATE] % _MISSED > 0:
                return self._follow_late(values)
            if values[_EDITED] > 0:
                self.engine.note_edited_gradients()
            # Each iteration reduces, on all ranks, units that some rank has not sent: see [Note: stray gradients]. Only
            # the norm of the last exchange counts.
            sent = False
            while unsent := self._unsent_units(values):
                # All ranks must skip the step if one rank edited gradients too early. Non-finite gradients cause a skip
                # anyway, and GradScaler edits those, too.
                missed = values[_EDITED] % _EARLY > 0 or (values[_EDITED] > 0 and values[self._stray] > 0)
                if missed and values[_BAD] == 0:
                    self._refuse_edited(unsent, held=values[self._stray] == 0)
                    self.must_skip = True
                # Without strays, no_sync() or an unfinished window held the gradients on purpose, so the order was
                # right.
                self.engine.postpone_reductions(unsent, held=values[self._stray] == 0)
                for index in unsent:
                    self.engine.send_unsent(index)
                sent = True
                values = self._exchange()
            # The sum is equal on all ranks, so all ranks take part in this exchange or none does.
            if values[self._passed_over] >= _REMOVED:
                pending = self.engine.pending
                doing = "naming gradients that were set to None"
                pending.learn_removed(self.engine.agreement.exchange_objects(pending.untold(), doing))
                values = self._exchange()
            # A skipped step needs no exact norm.
            if math.isfinite(values[0]) and self._clear_unused(values):
                values = self._exchange()
            self._renew_differing_caches(values)
            self.engine.note_step_sync(passed_over=values[self._passed_over] % _REMOVED > 0)
            if self.must_skip and self._vector is not None:
                values[0] = self._vector[0] = math.nan
            checked = self._checks or self.must_skip
            self._kept_stats = StepStats(norm_of(values[0]), self._flags(values), checked=checked, sent=sent)
        return self._kept_stats

    def keep_stats(self) -> StepStats:
        """Return the result, and keep it for the step unless gradients are edited before; see :meth:`recheck`."""
        self.recheck()  # a kept result may be outdated
        stats = self.reduce_stats()
        self._note_versions()
        self._kept = True
        return stats

    def _note_versions(self) -> None:
        """Record the shards' versions, which the vector describes."""
        self._all_stale = False
        self._versions = self._arrived_versions()

    def _arrived_versions(self) -> list[int]:
        return [gradient.shard._version for gradient in self._arrived()]

    def _may_read_late(self) -> bool:
        """Return True if the device may skip the step by itself; the same on every rank."""
        engine = self.engine
        return (
            self.defers_read
            and not self.must_skip
            and self._checks  # the device skips steps that are not finite
            and (engine.comm.world == 1 or engine.options.static_graph)
            and not self.cache_checksum.due
            and not any(gradient.feedbacks for gradient in engine.gradients)
            and all(buffer.paths.differences is None for buffer in engine.trainable_buffers)
        )

    def _needs_nothing(self) -> bool:
        """Return True if this rank needs nothing from the sum before it goes on."""
        engine = self.engine
        used = zip(engine.units, engine.pending.used, strict=True)
        return (
            not engine.passed_over
            and not self.missed
            and not any(gradient.has_unsent() for gradient in engine.gradients)
            # Frozen parameters have no gradient on any rank.
            and all(flag or not trained for unit, own in used for flag, trained in zip(own, unit.trained, strict=True))
        )

    def _sum_unread(self) -> StepStats:
        self._pending_sum = PendingSum(self._sum(self._measure_stale(), late=True))
        if (monitor := self.engine.agreement.monitor) is not None:
            monitor.watch_event(self._pending_sum, "the sum of norms and flags")
        self._go_on_late()
        return StepStats(None, [[used > 0 for used in flags] for flags in self.engine.pending.used], late=True)

    def _go_on_late(self) -> None:
        self.engine.agreement.unconfirmed = True
        self.engine.note_step_sync(passed_over=False)
        self.cache_checksum.count_step()

    def _follow_late(self, values: list[float]) -> StepStats:
        """Go on without using the sum, although this rank has read it, because other ranks have not waited for it."""
        assert self._vector is not None
        # Keep the sum as unread, so that errors in it are raised when the other ranks read it.
        self._pending_sum = PendingSum(self._vector)
        self._go_on_late()
        flags = self._flags(values)
        for unit, position in self.engine.pending.untold():
            flags[unit][position] = False  # ranks that go on late have the same graph, so no rank has used it since
        self._kept_stats = StepStats(None, flags, late=True)
        return self._kept_stats

    def skip_flag(self) -> Tensor:
        """Return a float32 scalar on the device: 1 if a step without a host decision must change no weight, else 0."""
        assert self._vector is not None
        bad = self._vector[0].isfinite().logical_not() | (self._vector[self._unsent : self._stray].sum() > 0)
        bad = bad | (self._vector[_LATE] >= _MISSED)
        if self.engine.comm.backend != "fake":  # the fake backend does not sum
            for place in (_HASH, _SETTINGS):
                bad = bad | differ_on_device(self._vector[place], self.engine.comm.world)
        return bad.to(torch.float32)

    def read_unread(self) -> StepStats | None:
        """Read a sum that the host has not waited for, and return its step's result; None if there is no such sum.

        Raises:
            RuntimeError: ranks issued different collectives or have different settings, so they skipped the step.
        """
        if self._pending_sum is None:
            return None
        values = self._pending_sum.read_sum(self.engine.agreement)
        self.forget_unread()  # after the read: an interrupt before it would drop the sum on this rank only
        self._check_late(values)
        return StepStats(norm_of(values[0]), [])  # no used mask, because parameters may have been unfrozen since

    def forget_unread(self) -> None:
        """Drop an unread sum. All ranks must do so together."""
        self._pending_sum = None
        self.engine.agreement.unconfirmed = False

    def _check_late(self, values: list[float]) -> None:
        """Raise if a sum that is read after its step shows an error, and stop reading late if squares overflowed."""
        unsent = self._unsent_units(values, late=True)
        if unsent:
            names = [self.engine.units[index].name for index in unsent]
            doing = f"adding up norms: only some ranks have unsent gradients of {names}, which static_graph rules out"
            raise self.engine.agreement.failure(doing, where="step()")
        if not math.isfinite(values[0]) and values[_BAD] == 0:
            # All ranks read the same sum, so all stop reading late. The overflow is then repaired before a step is
            # decided.
            self.defers_read = False
            _log.warning("squared gradients overflow float32: a step was skipped; later steps wait for their norm")

    def recheck(self) -> None:
        """Check before a step that a kept result still holds, as after clipping. Collective if there is a kept result.

        If any rank's gradients have changed since, all ranks discard the result.

        Raises:
            RuntimeError: the settings differ between ranks.
        """
        if self._kept_stats is None:
            return  # the coming sum compares the settings, so no exchange is needed
        # Edits through ``.data`` raise no version, and users may hold tensors of the groups since before the result.
        edited = (
            self._all_stale or self._versions != self._arrived_versions() or (self._kept and self._measures_otherwise())
        )
        doing = "comparing the settings of parameter groups"
        rows = self.engine.agreement.exchange(SETTINGS, [int(self._settings.code()) << 1 | edited], doing)
        codes = [row[0] for row in rows]
        if any(code >> 1 != codes[0] >> 1 for code in codes):
            raise self._settings.disagreement()
        if any(code & 1 for code in codes):
            self.invalidate()
            self.mark_stale()  # clipping has changed gradients, too, so their reports are outdated

    def _measures_otherwise(self) -> bool:
        """Measure all gradients again, and return True if their squares or flags differ from the reports."""
        gradients = self._arrived()
        reports = [gradient.report for gradient in gradients]
        before = total_of(reports, self.engine.device)
        for gradient in gradients:
            gradient.mark_stale()
            gradient.measure()
        # NaN compares as False, so non-finite gradients always count as changed.
        same = (total_of(reports, self.engine.device) - before).abs() <= _ROUNDING * before
        return not bool(same.all())

    def _renew_differing_caches(self, values: list[float]) -> None:
        """Renew cached weights from main weights if ranks that should cache the same weights have different bits."""
        used = sum([len(flags) for flags in self.engine.pending.used])
        if self.cache_checksum.due and self.cache_checksum.differ(values[self._used + used :]):
            _log.warning(
                "ranks that should cache the same weights have different bits, perhaps because of a memory or network "
                "fault; the cached weights are renewed from the main weights. Up to %d steps used them",
                self.cache_checksum.every,
            )
            self.engine.comm.ledger.count_event("<boundary>", "cached weights differ between ranks")
            self.engine.renew_caches()
        self.cache_checksum.count_step()

    def _refuse_edited(self, unsent: list[int], *, held: bool) -> None:
        """Log that some rank edited gradients before those of these units were reduced, so the step is skipped."""
        names = [self.engine.units[index].name for index in unsent]
        if held:
            _log.warning(
                "gradients were edited while those of units %s were held, by no_sync() or in an unfinished window, "
                "so the edit did not reach these; this step is skipped. Run the last backward of a step outside of "
                "no_sync(), and edit gradients after it",
                names,
            )
            return
        _log.warning(
            "gradients of units %s arrived in another order than before, after other gradients had been scaled; this "
            "step is skipped, and later backwards wait for these units",
            names,
        )

    def _clear_unused(self, values: list[float]) -> bool:
        """Zero values that error feedback brought to globally unused parameters; return True if there are any."""
        found = False
        if not any([gradient.feedbacks for gradient in self.engine.gradients]):
            return False
        for unit, used in zip(self.engine.units, self._flags(values), strict=True):
            flags = iter(used)
            for gradient in unit.gradients:
                own = [next(flags) for _ in gradient.trained]
                unused = [not flag and trained for flag, trained in zip(own, gradient.trained, strict=True)]
                # Only error feedback brings values to an unused parameter, and only if another parameter of the buffer
                # is used.
                if gradient.feedbacks and any(own) and any(unused):
                    found = True
                    if gradient.arrived:
                        gradient.clear(unused)
        return found

    def accept_scaling(self, factor: Tensor) -> None:
        """Update the squared norm after all gradients were multiplied by ``factor``; the other numbers stay valid."""
        assert self._vector is not None
        # The vector holds the square of the norm. A step that also clips by the configuration reads this norm.
        self._vector[0] *= factor.square()
        self._note_versions()

    def _exchange(self) -> list[float]:
        edited = self._measure_stale()
        values = self._read(self._sum(edited))
        if not math.isfinite(values[0]) and values[_BAD] == 0 and values[_LATE] % _MISSED == 0:
            # Squares of large finite values overflow float32, and reports may have no flag of Inf and NaN yet. All
            # ranks see this in the sum and repeat it, in float64 and with all flags.
            values = self._read(self._sum(edited, exact=True))
        return values

    def _sum(self, edited: Tensor, *, exact: bool = False, late: bool = False) -> Tensor:
        self._vector = self._assemble(edited, exact, late)
        with self.engine.agreement.watching("adding up norms and flags", where="step()"):
            self.engine.comm.sum(self._vector)
        return self._vector

    def _arrived(self) -> list[Gradient]:
        return [gradient for gradient in self.engine.gradients if gradient.arrived]

    def norm_tensor(self) -> Tensor:
        """Return the gradient norm as a scalar on the model's device; valid after :meth:`reduce_stats`."""
        assert self._vector is not None
        return rounded(self._vector[0].sqrt())

    def _measure_stale(self) -> Tensor:
        """Renew outdated reports; return float64 [1]: 1 if gradients changed since, plus _EARLY for accepted edits."""
        stale = [gradient for gradient in self._arrived() if gradient.stale]
        early = _EARLY * self._edited_early
        if not stale:
            return torch.full((1,), early, dtype=torch.float64, device=self.engine.device)
        reports = [gradient.report for gradient in stale]
        # A raised version proves an edit. Without one, look for scaling only, which GradScaler does unseen.
        edited = any(gradient.edited for gradient in stale)
        before = total_of(reports, self.engine.device)[0]
        for gradient in stale:
            gradient.measure()
        # Fused kernels and separate measurements may sum in different orders.
        scaled = (total_of(reports, self.engine.device)[0] - before).abs() > _ROUNDING * before
        return early + torch.where(scaled, 1.0, float(edited)).to(torch.float64)[None]

    def _measure(self, exact: bool) -> Tensor:
        """Return float64 [2]: this rank's part of the squared norm, and its number of non-finite shards."""
        # Replicas hold the same sums, so only the first replica contributes.
        gradients = [gradient for gradient in self._arrived() if gradient.placement.replica == 0]
        # Without flags, a sum that is not finite is repeated with exact=True. A sum that is read late is not repeated.
        if exact or self.defers_read:
            for gradient in gradients:
                gradient.report.measure_flag(gradient.shard)
        found = total_of([gradient.report for gradient in gradients], self.engine.device)
        if exact and gradients:
            found[0] = square_over([gradient.shard for gradient in gradients], self.engine.device)
        return found

    def _assemble(self, edited: Tensor, exact: bool, late: bool) -> Tensor:
        engine = self.engine
        settings = self._settings.code()
        flags: list[float] = [*encode_hash(engine.sequence_hash)]
        flags += encode_hash(settings) if isinstance(settings, int) else [0.0] * 3
        flags.append(late + _MISSED * bool(self.missed))
        unsent = [any(map(Gradient.has_unsent, unit.gradients)) for unit in engine.units]
        flags += unsent
        flags.append(any(unsent) and any(map(Gradient.has_stray, engine.gradients)))
        flags.append(engine.passed_over + _REMOVED * bool(engine.pending.untold()))
        flags += map(bool, chain.from_iterable(engine.pending.used))
        # Use pinned memory, so that the copy does not wait. torch's allocator keeps the block until the copy is done.
        host = torch.tensor(flags, dtype=torch.float64, device="cpu", pin_memory=engine.device.type == "cuda")
        parts = [self._measure(exact), edited, host.to(engine.device, non_blocking=True)]
        if self.cache_checksum.due:
            # A refresh in flight still writes the cached weights, so wait before computing their checksums.
            engine.wait_for_refresh()
            parts.append(self.cache_checksum.sums())
        vector = torch.cat(parts)
        if isinstance(settings, Tensor):
            # Hash settings that are CUDA tensors on the device. Reading them would be a second wait for the device.
            vector[_SETTINGS] = torch.stack(encode_hash(settings)).to(vector)
        return vector

    def _read(self, vector: Tensor) -> list[float]:
        """Copy a summed vector to the host, wait for it, and return its numbers."""
        self.reads += 1
        return PendingSum(vector).read_sum(self.engine.agreement)

    def _unsent_units(self, values: list[float], *, late: bool = False) -> list[int]:
        self._check_in_step(values, late=late)
        return [unit.index for unit in self.engine.units if values[self._unsent + unit.index] > 0]

    def _check_in_step(self, values: list[float], *, late: bool = False) -> None:
        if self._disagree(values[_HASH]):
            raise self.engine.agreement.failure(
                f"comparing what was gathered and reduced, hash {self.engine.sequence_hash:x}", where="step()"
            )
        if self._disagree(values[_SETTINGS]):
            raise self._settings.disagreement(late=late)
        if values[_LATE] >= _MISSED:
            raise self._missed_edits(late=late)

    def note_missed(self, names: list[str]) -> None:
        """Record weight edits that a forward missed, and warn now, because no step may follow."""
        if names and not self.missed:
            _log.warning(
                "weights were edited in some of %s, in optimizer.param_groups, and this forward computes with the old "
                "weights; the next step() will be refused. %s",
                names[:8],
                _HOW_TO_EDIT,
            )
        self.missed += names

    def _missed_edits(self, *, late: bool) -> RuntimeError:
        """Return the error for weight edits that a forward missed. Collective; local if the step is over (``late``)."""
        own = self.missed
        self.missed = []
        told = {self.engine.comm.rank: own}
        if not late:
            told = dict(enumerate(self.engine.agreement.exchange_objects(own, "naming weights that were edited")))
            # Renew the weights, so that the next forward uses the edits if the caller catches the error.
            self.engine.weights_changed(self.engine.trainable_buffers, delay_refresh=True)
        ranks = [rank for rank, names in told.items() if names]
        names = list(dict.fromkeys(name for names in told.values() for name in names))
        where = f"on rank{'s' * (len(ranks) > 1)} {ranks}, in some of {names[:8]}," if names else "on another rank"
        return RuntimeError(
            f"weights were edited between steps {where} and a forward has computed with the old weights, so "
            f"nothing was stepped. {_HOW_TO_EDIT}"
        )

    def _disagree(self, numbers: list[float]) -> bool:
        """Return True if the sums of a hash show different values on the ranks. The fake backend does not sum."""
        return differ(numbers, self.engine.comm.world) and self.engine.comm.backend != "fake"

    def _flags(self, values: list[float]) -> list[list[bool]]:
        """Return, for each unit, a mask of the parameters that any rank has used."""
        flags = iter([value > 0 for value in values[self._used :]])
        return [list(islice(flags, len(own))) for own in self.engine.pending.used]


# Sums that are copied from the device to the host.


class PendingSum:
    """A copy of a summed vector on its way to the host.

    Args:
        vector: summed vector, float64, on the model's device; its values at construction are copied.
    """

    def __init__(self, vector: Tensor) -> None:
        self._device = vector.device
        self._event: torch.cuda.Event | None = None
        if vector.device.type == "cuda":
            self._host = vector.to("cpu", non_blocking=True)
            # tolist() on the device tensor would block forever if a rank never sent its part. An event can be polled
            # with a timeout.
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(vector.device))
        else:
            self._host = vector.clone()  # a copy, because accept_scaling changes the vector

    def read_sum(self, agreement: Agreement) -> list[float]:
        """Wait for the copy, and return the numbers.

        Raises:
            RuntimeError: the common error of all ranks, after ``hang_timeout`` seconds.
        """
        if self._event is not None:
            # Querying an event initializes CUDA on the current device, which need not be the model's device.
            with torch.cuda.device(self._device):
                agreement.wait_for_event(self.wait, agreement.watching("waiting for the sum of norms and flags"))
        return list(self._host.tolist())

    def wait(self, timeout: float) -> bool:
        """Wait until the numbers are on the host; return False after ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > until:
                return False
            time.sleep(2e-5)
        return True

    def done(self) -> bool:
        """Return True if the numbers are on the host."""
        return self._event is None or bool(self._event.query())


# Checksums of cached weights.

_CHECKSUM_EVERY = 100  # number of steps between comparisons
# Bits of a checksum in one number. Sums of squares over up to 2**21 ranks are then exact in float64.
_PIECE = 16
_PIECES = 64 // _PIECE
# Number of 64-bit words that are processed at a time, which bounds the temporary memory.
_CHECKSUM_TILE = 2**18
# Multiplier of the hash: any odd number. 2**64 is subtracted to fit int64. Products wrap around on overflow.
_CHECKSUM_ODD = 0x9E3779B97F4A7C15 - 2**64


class CacheChecksum:
    """Compares, at intervals, the bits of weights that several ranks cache.

    Differences update cached weights correctly only if the cached bits are equal on all ranks: a flipped bit on one
    rank would stay. The 64-bit checksum travels in 16-bit pieces; see [Note: equality by sums].

    Attributes:
        every: number of steps from one comparison to the next.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = 0
        self.every = _CHECKSUM_EVERY

    @property
    def due(self) -> bool:
        """True if this step compares checksums; the same on every rank."""
        return self._steps % self.every == self.every - 1 and any(buffer.base is not None for buffer in self._buffers)

    def count_step(self) -> None:
        """Count a step."""
        self._steps += 1

    @property
    def _buffers(self) -> list[FlatBuffer]:
        return [buffer for buffer in self._engine.buffers if buffer.base is not None]

    @property
    def _levels(self) -> list[int]:
        return sorted({_level(buffer) for buffer in self._buffers})

    def sums(self) -> Tensor:
        """Return this rank's part of the vector, float64, to be summed over ranks. No refresh may be in flight."""
        rows = []
        for level in self._levels:
            buffers = [buffer for buffer in self._buffers if _level(buffer) == level]
            total = torch.zeros((), dtype=torch.int64, device=self._engine.device)
            for buffer in buffers:
                assert buffer.base is not None
                # Multiply between buffers, so that exchanging the bits of two buffers changes the checksum.
                total = total * _CHECKSUM_ODD + _checksum(buffer.base)
            numbers = torch.stack([(total >> _PIECE * i) & (2**_PIECE - 1) for i in range(_PIECES)]).double()
            # The table has one row per slice of this level, and each rank fills its own row. So the sum over ranks is,
            # per row, the sum over the ranks that cache that slice.
            table = torch.zeros(level, 2, _PIECES, dtype=torch.float64, device=total.device)
            table[buffers[0].placement.chain.slice_index(self._engine.comm.rank, level)] = torch.stack(
                [numbers, numbers.square()]
            )
            rows.append(table.view(-1))
        return torch.cat(rows)

    def differ(self, summed: list[float]) -> bool:
        """Return True if ranks have different checksums of a slice, given the sum of :meth:`sums` over all ranks."""
        values = iter(summed)
        for level in self._levels:
            copies = self._engine.comm.world // level
            for _ in range(level):
                numbers, squares = ([int(next(values)) for _ in range(_PIECES)] for _ in range(2))
                # The numbers are equal if and only if the sum of squares is minimal: see [Note: equality by sums].
                if any(copies * square != number**2 for number, square in zip(numbers, squares, strict=True)):
                    return True
        return False


def _level(buffer: FlatBuffer) -> int:
    level = buffer.placement.mode.cached
    assert level is not None  # buffers with a base are cached
    return level


def _checksum(values: Tensor) -> Tensor:
    """Return an int64 checksum of 16-bit values [blocks, 256]: a sum of 64-bit words times distinct odd numbers."""
    words = values.view(torch.int64)
    # Odd factors are invertible modulo 2**64, so a change of one word always changes the sum. Distinct factors also
    # detect words that have changed places.
    odd = torch.arange(1, 2 * min(_CHECKSUM_TILE, words.numel()), 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHECKSUM_TILE):
        part = words[start : start + _CHECKSUM_TILE]
        total += (part * (odd[: part.numel()] + 2 * start)).sum()
    return total


# Hashes that are compared by their sums over the ranks.

_Code = TypeVar("_Code", int, Tensor)
# The square of a hash has 48 bits, and its sum over more than 32 ranks is not exact in float64. So it is sent in two
# halves.
_SQUARE_HALF = 4096


def encode_hash(code: _Code) -> list[_Code]:
    """Return a 24-bit hash and the two halves of its square, to be summed in float64; [Note: equality by sums]."""
    return [code, code * code // _SQUARE_HALF, code * code % _SQUARE_HALF]


def differ(sums: Sequence[float], world: int) -> bool:
    """Return True if ranks have different hashes, given the sums of :func:`encode_hash` over ``world`` ranks."""
    # Use Python's integers, which do not round.
    total = int(sums[0])
    squares = int(sums[1]) * _SQUARE_HALF + int(sums[2])
    return world * squares != total * total


def differ_on_device(sums: Tensor, world: int) -> Tensor:
    """Return :func:`differ` of float64 [3] as a bool scalar on its device; the host does not wait."""
    total, high, low = sums.to(torch.int64).unbind()
    # Both sides wrap around at 64 bits. Below 512 ranks their difference is smaller than 2**64, so the result is exact.
    # With more ranks it is wrong only if the difference is a nonzero multiple of 2**64.
    return world * (high * _SQUARE_HALF + low) != total * total


# Norms.


def norm_of(square: float) -> float:
    """Return the norm for a square that was summed over ranks."""
    return float(rounded(torch.tensor(square, dtype=torch.float64, device="cpu").sqrt()))


def rounded(norm: Tensor) -> Tensor:
    """Return a norm rounded to 40 bits, so that clipped gradients do not depend on the summation order of units."""
    mantissa, exponent = torch.frexp(norm)
    return torch.ldexp(torch.round(mantissa * 2.0**40) / 2.0**40, exponent)


def square_over(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares over shards on any devices: a float64 scalar on ``device``.

    The squares may exceed float32's range.
    """
    # Shards may be in device and host memory. Sum the shards of each memory where they are.
    memories = dict.fromkeys(shard.device for shard in shards)
    parts = [squared_norm([shard for shard in shards if shard.device == memory]) for memory in memories]
    return torch.stack([part.to(device) for part in parts]).sum()
