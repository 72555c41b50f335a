"""The step sync: two small reductions around an optimizer step, and the one host read.

After the last backward one number tells every rank whether all gradients are finite, before torch's GradScaler looks.
In ``step`` one vector carries the squared gradient norm, which parameters were used anywhere, which units still have
unsent gradients on some rank, whether all ranks issued the same collectives and have the same settings, whether some
rank has computed without the user's edits of weights, and now and then whether they cache the same weights.

This file owns that vector: it is assembled, summed, read and judged here. :class:`StepStats` is the result.

[Note: sums read late] Where nothing that the vector says changes what the host queues next, the host does not wait for
it: the device leaves a step out, and the host reads the vector at the next step, or when somebody asks what became of
this one. That takes one rank, or the promise of ``static_graph``; a fused Adam, which looks at ``found_inf``; and no
codec to which leaving a step out is more than changing nothing (differences, carried errors). Of each rank by itself it
takes that it has used every trained parameter and sent every gradient. One that has not waits for the sum, which tells
it whether others have gone on: then it does what they do, and what else the sum says it reads where they read it.

[Note: equality by sums] A sum over ranks of numbers and one of their squares tell whether all ranks have the same
number: ``n * sum(x * x) >= sum(x) ** 2``, and the two are equal only if all ``x`` are (Cauchy and Schwarz). So hashes
and checksums travel in the vector, and no rank needs to know another's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from zeropp.comm.agreement import SETTINGS, Agreement
from zeropp.engine.engine import Engine
from zeropp.params.gradient import Gradient
from zeropp.params.unit import FlatBuffer
from zeropp.wire.codecs import Report
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

_BAD = 1  # shards that are not finite
_EDITED = 2  # ranks whose gradients were changed after the last backward, and _EARLY times those before it
_HASH = slice(3, 6)  # of what was issued, see encode_hash
_SETTINGS = slice(6, 9)  # of the optimizer's
_LATE = 9  # ranks that do not wait for the sum, and _MISSED times those with edits of weights that a forward missed
_MISSED = _REMOVED = _EARLY = 2.0**20  # more than there are ranks
_HOW_TO_EDIT = (
    "The model computes with weights that all ranks gather together, and a rank that holds no part of what was edited "
    "cannot know of the edit. Edit all tensors of a parameter group in one loop, on every rank; or edit whole "
    "parameters in zeropp.zero.GatheredParameters(parameters, modifier_rank=0)"
)
_ROUNDING = 1e-6  # between two orders of adding up squares in float32


@dataclass(frozen=True)
class StepStats:
    """The result of the step sync, the same on every rank.

    Attributes:
        norm: gradient norm over the whole model, all ranks; not finite if any gradient is; None if it is read late.
        used: for each unit, whether each trainable parameter had a gradient on any rank since the last zero_grad.
        late: some rank does not know it yet, so that all go through the step, which the device may leave out.
        checked: a step with a norm that is not finite is skipped.
        sent: gradients that backwards had held, or that came out of order, had to be reduced first.
    """

    norm: float | None
    used: list[list[bool]]
    late: bool = False
    checked: bool = True
    sent: bool = False

    @property
    def skips(self) -> bool:
        """True if the step is skipped; False if only the device knows, which then leaves the step out."""
        return self.checked and self.norm is not None and not math.isfinite(self.norm)


class SyncedSettings(Protocol):
    """Numbers that every rank steps with, seen from here."""

    def code(self) -> int | Tensor:
        """24 bits of a hash, on the host or on the device."""
        ...

    def disagreement(self, *, late: bool = False) -> RuntimeError:
        """The error when hashes differ. Collective; of a step that is over, ``late``, local."""
        ...


class StepSync:
    """Assembles, sums and reads the vector.

    Args:
        engine: whose steps they are.
        settings: compared between ranks.
        checks_overflow: skip a step with a gradient that is not finite.

    Attributes:
        reads: how many times the host has waited for numbers; once a step, more often where gradients were unsent, and
            never where they are read late.
        reads_late: whether they may be, on a card; see [Note: sums read late].
        cache_checksum: compares what ranks cache.
        spoiled: gradients were edited before others of the same step had been reduced, which the edit missed; the step
            is skipped. The same on every rank.
        missed: names of parameters; some of them were edited on this rank, and a forward has computed without the edit.
    """

    def __init__(self, engine: Engine, settings: SyncedSettings, *, checks_overflow: bool) -> None:
        self.engine = engine
        self._settings = settings
        self.reads = 0
        self._checks = checks_overflow
        # On CPU there is nothing that the host could run ahead of.
        self.reads_late = engine.device.type == "cuda"
        self.cache_checksum = CacheChecksum(engine)
        self.missed: list[str] = []
        self.spoiled = False
        self._edited_early = False  # edits were accepted as a backward began; late gradients may have missed them
        self._pending_sum: PendingSum | None = None
        self._vector: Tensor | None = None
        self._verdict: StepStats | None = None
        self._doubts = False  # all gradients that have arrived are in doubt
        self._kept = (
            False  # the statistics were asked for before the step, and the user may have edited gradients since
        )
        # Of the gradients that have arrived, as the step's statistics have them; None unless it is to last until the
        # step.
        self._versions: list[int] | None = None
        # Places in the vector, behind the square of the norm and what is named above: a flag for each unit with unsent
        # gradients, one for strays among these, one that counts ranks that passed over units, and _REMOVED times those
        # with removed gradients to tell of, one for each used parameter; checksums at the end.
        self._unsent = _LATE + 1
        self._stray = self._unsent + len(engine.units)
        self._passed_over = self._stray + 1
        self._used = self._passed_over + 1

    def invalidate(self) -> None:
        """Forget; gradients have changed."""
        self._vector = None
        self._verdict = None
        self._versions = None
        self._doubts = self._kept = False

    def take_early_edits(self) -> None:
        """Accept edits that were made before the backward that begins now.

        Plain torch would not apply them to the gradients of this backward, so nothing is lost if it holds these, as in
        ``no_sync()``. Gradients that an earlier backward holds have missed the edit: then it stays noted.
        """
        edited = [gradient for gradient in self._arrived() if gradient.edited]
        if edited and not any(gradient.held is not None for gradient in self.engine.gradients):
            self._edited_early = True
            for gradient in edited:
                gradient.measure()

    def forget_early_edits(self) -> None:
        """Forget which edits the step was to reckon with: it was decided, or its gradients were forgotten."""
        self._edited_early = self.spoiled = False

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
        bad = total_of([gradient.report for gradient in gradients], self.engine.device)[1]
        flag = torch.where(bad == 0, 0.0, torch.nan)
        with self.engine.agreement.watching("sharing whether gradients are finite", where="a backward"):
            self.engine.comm.sum(flag)
        # GradScaler looks at every gradient it is shown, so one spoiled element of one of them is enough.
        # For the host's memory, where gradients may be, it waits; so has whoever stored them.
        target[:1] += flag.to(target)
        if source is not None:
            # Where the NaN comes from, the report says so, and one rank's is enough for all.
            source.accept_edits()

    def reduce_stats(self, *, late: bool = False) -> StepStats:
        """The result, once per step; all that waits for the device is in here.

        Args:
            late: whoever asks goes by :meth:`left_out`, and needs no number on the host.

        Raises:
            RuntimeError: the ranks did not issue the same collectives; or had not, when they stepped last.
        """
        if self._verdict is None:
            # Of a sum that no step has followed, as after clipping: every rank has it, and raises here or none does.
            self.read_unread()
            if late and self._may_read_late() and self._needs_nothing():
                self._verdict = self._sum_unread()
        if self._verdict is None:
            values = self._exchange()
            if values[_LATE] % _MISSED > 0:
                return self._follow_late(values)
            if values[_EDITED] > 0:
                self.engine.note_edited_gradients()
            # Each turn sends, on every rank, what some rank still had: see [Note: stray gradients]. The norm counts
            # only once nothing is left to send.
            sent = False
            while unsent := self._unsent_units(values):
                # Summed, since an edit on one rank alone must make all of them skip. GradScaler has changed gradients
                # that are not finite, too, and with those the step is skipped anyway.
                missed = values[_EDITED] % _EARLY > 0 or (values[_EDITED] > 0 and values[self._stray] > 0)
                if missed and values[_BAD] == 0:
                    self._refuse_edited(unsent, held=values[self._stray] == 0)
                    self.spoiled = True
                # Without strays all of it was held on purpose, by no_sync() or a window, and no order was at fault.
                self.engine.postpone_reductions(unsent, held=values[self._stray] == 0)
                for index in unsent:
                    self.engine.send_unsent(index)
                sent = True
                values = self._exchange()
            # The sum is the same everywhere, so all ranks go in here or none does.
            if values[self._passed_over] >= _REMOVED:
                pending = self.engine.pending
                doing = "naming gradients that were set to None"
                pending.learn_removed(self.engine.agreement.exchange_objects(pending.untold(), doing))
                values = self._exchange()
            # A step that is skipped needs no clean norm.
            if math.isfinite(values[0]) and self._clear_unused(values):
                values = self._exchange()
            self._renew_differing_caches(values)
            self.engine.note_step_sync(passed_over=values[self._passed_over] % _REMOVED > 0)
            if self.spoiled and self._vector is not None:
                values[0] = self._vector[0] = math.nan
            checked = self._checks or self.spoiled
            self._verdict = StepStats(norm_of(values[0]), self._flags(values), checked=checked, sent=sent)
        return self._verdict

    def keep_verdict(self) -> StepStats:
        """The result, which lasts until the step unless gradients are edited before; see :meth:`recheck`."""
        self.recheck()  # it may have been kept before
        stats = self.reduce_stats()
        self._note_versions()
        self._kept = True
        return stats

    def _note_versions(self) -> None:
        """Remember that the vector describes the gradients as they are now."""
        self._doubts = False
        self._versions = self._arrived_versions()

    def _arrived_versions(self) -> list[int]:
        return [gradient.shard._version for gradient in self._arrived()]

    def _may_read_late(self) -> bool:
        """Tell whether the device may leave the step out; the same on every rank."""
        engine = self.engine
        return (
            self.reads_late
            and not self.spoiled
            and self._checks  # the device leaves out what is not finite
            and (engine.comm.world == 1 or engine.options.static_graph)
            and not self.cache_checksum.due
            and not any(gradient.feedbacks for gradient in engine.gradients)
            and all(buffer.paths.differences is None for buffer in engine.trainable_buffers)
        )

    def _needs_nothing(self) -> bool:
        """Tell whether this rank can go on before it has read the sum."""
        engine = self.engine
        used = zip(engine.units, engine.pending.used, strict=True)
        return (
            not engine.passed_over
            and not self.missed
            and not any(gradient.has_unsent() for gradient in engine.gradients)
            # What is frozen by now has no gradient on any rank.
            and all(flag or not trained for unit, own in used for flag, trained in zip(own, unit.trained, strict=True))
        )

    def _sum_unread(self) -> StepStats:
        self._pending_sum = PendingSum(self._sum(self._measure_doubted(), late=True))
        if (monitor := self.engine.agreement.monitor) is not None:
            monitor.watch_event(self._pending_sum, "the sum of norms and flags")
        self._go_on_late()
        return StepStats(None, [[used > 0 for used in flags] for flags in self.engine.pending.used], late=True)

    def _go_on_late(self) -> None:
        self.engine.agreement.unconfirmed = True
        self.engine.note_step_sync(passed_over=False)
        self.cache_checksum.count_step()

    def _follow_late(self, values: list[float]) -> StepStats:
        """Other ranks have gone on without these numbers: so does this one, which has them."""
        assert self._vector is not None
        # What is wrong with them it raises where the others see it.
        self._pending_sum = PendingSum(self._vector)
        self._go_on_late()
        flags = self._flags(values)
        for unit, position in self.engine.pending.untold():
            flags[unit][position] = False  # ranks that go on late do the same in every step, so none has used it since
        self._verdict = StepStats(None, flags, late=True)
        return self._verdict

    def left_out(self) -> Tensor:
        """float32 scalar on the model's device: 1 if the step, whose statistics have no norm, must not change a
        weight.
        """
        assert self._vector is not None
        bad = self._vector[0].isfinite().logical_not() | (self._vector[self._unsent : self._stray].sum() > 0)
        bad = bad | (self._vector[_LATE] >= _MISSED)
        if self.engine.comm.backend != "fake":  # which does not sum at all
            for place in (_HASH, _SETTINGS):
                bad = bad | differ_on_device(self._vector[place], self.engine.comm.world)
        return bad.to(torch.float32)

    def read_unread(self) -> StepStats | None:
        """Read the sum that no host has waited for, and judge its step by it; None if there is no such sum.

        Raises:
            RuntimeError: the ranks did not issue the same collectives, or had other settings. They left the step out.
        """
        if self._pending_sum is None:
            return None
        values = self._pending_sum.read_sum(self.engine.agreement)
        self.forget_unread()  # not before: an error of a signal would take it from this rank alone
        self._check_late(values)
        return StepStats(norm_of(values[0]), [])  # no flags: parameters may have been unfrozen since

    def forget_unread(self) -> None:
        """Drop such a sum; every rank does."""
        self._pending_sum = None
        self.engine.agreement.unconfirmed = False

    def _check_late(self, values: list[float]) -> None:
        """Check a sum that was read after its step."""
        unsent = self._unsent_units(values, late=True)
        if unsent:
            names = [self.engine.units[index].name for index in unsent]
            doing = f"adding up norms: some ranks alone have gradients of {names} left, which static_graph rules out"
            raise self.engine.agreement.failure(doing, where="step()")
        if not math.isfinite(values[0]) and values[_BAD] == 0:
            # All ranks come to see it, and from then on add up such squares again before they decide.
            self.reads_late = False
            _log.warning("squares of gradients pass float32: a step was left out, and from now on norms are waited for")

    def recheck(self) -> None:
        """Check, before a step, that statistics made earlier still hold, as after clipping. Collective if there is one.

        Settings may have changed since, and so may gradients: if any rank's have, all ranks forget the step's
        statistics.

        Raises:
            RuntimeError: the settings differ between ranks.
        """
        if self._verdict is None:
            return  # the sum that is to come carries the settings, and no message of their own is needed
        # Edits through ``.data`` raise no version, and tensors of the groups may have been taken before.
        edited = (
            self._doubts or self._versions != self._arrived_versions() or (self._kept and self._measures_otherwise())
        )
        doing = "comparing the settings of parameter groups"
        rows = self.engine.agreement.exchange(SETTINGS, [int(self._settings.code()) << 1 | edited], doing)
        codes = [row[0] for row in rows]
        if any(code >> 1 != codes[0] >> 1 for code in codes):
            raise self._settings.disagreement()
        if any(code & 1 for code in codes):
            self.invalidate()
            self.doubt()  # clipping has changed gradients that nobody has edited, too

    def _measures_otherwise(self) -> bool:
        """Measure gradients again; returns whether their squares or flags are others than before."""
        gradients = self._arrived()
        reports = [gradient.report for gradient in gradients]
        before = total_of(reports, self.engine.device)
        for gradient in gradients:
            gradient.doubt()
            gradient.measure()
        # NaN is no number, so it is never within the bound.
        same = (total_of(reports, self.engine.device) - before).abs() <= _ROUNDING * before
        return not bool(same.all())

    def _renew_differing_caches(self, values: list[float]) -> None:
        """Renew what is cached, from main weights alone, if ranks that cache the same weights have other bits."""
        used = sum(len(flags) for flags in self.engine.pending.used)
        if self.cache_checksum.due and self.cache_checksum.differ(values[self._used + used :]):
            _log.warning(
                "ranks that cache the same weights have different bits of them, perhaps since a fault of memory or of "
                "a link; they are renewed from the main weights. Up to %d steps were computed with them",
                self.cache_checksum.every,
            )
            self.engine.comm.ledger.count_event("<boundary>", "cached weights differ between ranks")
            self.engine.renew_caches()
        self.cache_checksum.count_step()

    def _refuse_edited(self, unsent: list[int], *, held: bool) -> None:
        """Say that what is unsent cannot be added to what torch's GradScaler, or the user, has changed on some rank."""
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
            "gradients of units %s came in another order than before, after the others had been scaled; this step "
            "is skipped, and they are waited for from now on",
            names,
        )

    def _clear_unused(self, values: list[float]) -> bool:
        """Zero what carried errors have brought to parameters that no rank has used; the same answer everywhere."""
        found = False
        for unit, used in zip(self.engine.units, self._flags(values), strict=True):
            flags = iter(used)
            for gradient in unit.gradients:
                own = [next(flags) for _ in gradient.trained]
                unused = [not flag and trained for flag, trained in zip(own, gradient.trained, strict=True)]
                # Without feedback nothing can arrive for a parameter that no rank has used, or where none was used.
                if gradient.feedbacks and any(own) and any(unused):
                    found = True
                    if gradient.arrived:
                        gradient.clear(unused)
        return found

    def accept_scaling(self, factor: Tensor) -> None:
        """The wrapper multiplied all gradients by ``factor``: the norm follows, the other statistics stay."""
        assert self._vector is not None
        # The vector holds the square. A step that clips by the configuration, too, reads the norm from here.
        self._vector[0] *= factor.square()
        self._note_versions()

    def _exchange(self) -> list[float]:
        edited = self._measure_doubted()
        values = self._add_up(edited)
        if not math.isfinite(values[0]) and values[_BAD] == 0 and values[_LATE] % _MISSED == 0:
            # Squares of large finite values pass float32; all ranks see that, and do it again.
            values = self._add_up(edited, exact=True)
        return values

    def _add_up(self, edited: Tensor, *, exact: bool = False) -> list[float]:
        return self._read(self._sum(edited, exact=exact))

    def _sum(self, edited: Tensor, *, exact: bool = False, late: bool = False) -> Tensor:
        self._vector = self._assemble(edited, exact, late)
        with self.engine.agreement.watching("adding up norms and flags", where="step()"):
            self.engine.comm.sum(self._vector)
        return self._vector

    def _arrived(self) -> list[Gradient]:
        return [gradient for gradient in self.engine.gradients if gradient.arrived]

    def norm_tensor(self) -> Tensor:
        """The norm as a scalar on the model's device; after :meth:`reduce_stats`."""
        assert self._vector is not None
        return rounded(self._vector[0].sqrt())

    def _measure_doubted(self) -> Tensor:
        """Renew reports; float64 [1], 1 if gradients were changed after the last backward."""
        doubted = [gradient for gradient in self._arrived() if gradient.doubted]
        early = _EARLY * self._edited_early
        if not doubted:
            return torch.full((1,), early, dtype=torch.float64, device=self.engine.device)
        # A version that has risen is a proof. Without one only scaling is looked for, which is GradScaler's.
        edited = any(gradient.edited for gradient in doubted)
        reports = [gradient.report for gradient in doubted]
        before = total_of(reports, self.engine.device)[0]
        for gradient in doubted:
            gradient.measure()
        # A kernel and a pass of its own may add in another order.
        scaled = (total_of(reports, self.engine.device)[0] - before).abs() > _ROUNDING * before
        return early + torch.where(scaled, 1.0, float(edited)).to(torch.float64)[None]

    def _measure(self, exact: bool) -> Tensor:
        """float64 [2]: the square of this rank's part of the norm, and how many of its shards are not finite."""
        # Replicas hold the same sums; the first one's count.
        gradients = [gradient for gradient in self._arrived() if gradient.placement.replica == 0]
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
        flags += [float(any(g.has_unsent() for g in unit.gradients)) for unit in engine.units]
        flags.append(float(any(g.has_stray() for g in engine.gradients)))
        flags.append(engine.passed_over + _REMOVED * bool(engine.pending.untold()))
        flags += [float(used > 0) for unit_flags in engine.pending.used for used in unit_flags]
        # Pinned: the copy is queued and not waited for. torch's allocator keeps the block until it is done.
        host = torch.tensor(flags, dtype=torch.float64, device="cpu", pin_memory=engine.device.type == "cuda")
        parts = [self._measure(exact), edited, host.to(engine.device, non_blocking=True)]
        if self.cache_checksum.due:
            # A refresh under way is still writing what the checksums are of.
            engine.wait_for_refresh()
            parts.append(self.cache_checksum.sums())
        vector = torch.cat(parts)
        if isinstance(settings, Tensor):
            # Settings that live on a card are hashed there: to read them would be a second wait for the device.
            vector[_SETTINGS] = torch.stack(encode_hash(settings)).to(vector)
        return vector

    def _read(self, vector: Tensor) -> list[float]:
        """The one place that waits for numbers on the host."""
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
        """A forward computes without this rank's edits of weights: say so now, since a step may never follow."""
        if names and not self.missed:
            _log.warning(
                "weights were edited in some of %s, in optimizer.param_groups, and this forward computes with the old "
                "weights; the next step() will be refused. %s",
                names[:8],
                _HOW_TO_EDIT,
            )
        self.missed += names

    def _missed_edits(self, *, late: bool) -> RuntimeError:
        """The error for edits that a forward has missed. Collective; of a step that is over, ``late``, local."""
        own = self.missed
        self.missed = []
        told = {self.engine.comm.rank: own}
        if not late:
            told = dict(enumerate(self.engine.agreement.exchange_objects(own, "naming weights that were edited")))
            # Whoever catches this finds the edits in the next forward.
            self.engine.weights_changed(self.engine.trainable_buffers, for_now=True)
        ranks = [rank for rank, names in told.items() if names]
        names = list(dict.fromkeys(name for names in told.values() for name in names))
        where = f"on rank{'s' * (len(ranks) > 1)} {ranks}, in some of {names[:8]}," if names else "on another rank"
        return RuntimeError(
            f"weights were edited between steps {where} and a forward has computed with the old weights, so "
            f"nothing was stepped. {_HOW_TO_EDIT}"
        )

    def _disagree(self, numbers: list[float]) -> bool:
        """Tell whether a hash differs between ranks, from its sums. A fake backend does not sum."""
        return differ(numbers, self.engine.comm.world) and self.engine.comm.backend != "fake"

    def _flags(self, values: list[float]) -> list[list[bool]]:
        """For each unit, which parameters any rank has used."""
        flags = iter(values[self._used :])
        return [[next(flags) > 0 for _ in unit_flags] for unit_flags in self.engine.pending.used]


def total_of(reports: Sequence[Report], device: torch.device) -> Tensor:
    """float64 [2]: the sum of all squares of gradient shards, and how many of the shards are not finite."""
    zero = torch.zeros(1, dtype=torch.float64, device=device)
    squares = [report.squares[None] for report in reports if report.squares is not None]
    blocks = [report.norms for report in reports if report.squares is None]
    # Few launches, whatever the number of units.
    measured = torch.cat(blocks).sum(dtype=torch.float64)[None] if blocks else zero
    flags = torch.cat([report.flag for report in reports]).sum().to(torch.float64)[None] if reports else zero
    return torch.cat([torch.cat([*squares, measured]).sum()[None], flags])


# Numbers on their way from the device to the host.


class PendingSum:
    """A sum over ranks, as it is when this is made.

    Args:
        vector: float64, on the model's device.
    """

    def __init__(self, vector: Tensor) -> None:
        self._device = vector.device
        self._event: torch.cuda.Event | None = None
        if vector.device.type == "cuda":
            self._host = vector.to("cpu", non_blocking=True)
            # A plain tolist() would wait in the driver for ever if a rank never came; an event can be asked, and given
            # up.
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(vector.device))
        else:
            self._host = vector.clone()  # it is scaled when gradients are

    def read_sum(self, agreement: Agreement) -> list[float]:
        """The numbers; waits until they have come.

        Raises:
            RuntimeError: the common error, if they do not come within ``hang_timeout``.
        """
        if self._event is not None:
            # Asking an event makes a context on the card that is current, which need not be the model's.
            with torch.cuda.device(self._device):
                agreement.wait_for_event(self.wait, "waiting for the sum of norms and flags")
        values: list[float] = self._host.tolist()
        return values

    def wait(self, timeout: float) -> bool:
        """Let the host wait; False after ``timeout`` seconds in vain."""
        until = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() > until:
                return False
            time.sleep(2e-5)
        return True

    def done(self) -> bool:
        """Tell whether the numbers have come."""
        return self._event is None or bool(self._event.query())


# Checksums of cached weights.

_CHECKSUM_EVERY = 100  # steps
# Bits of a checksum in one number: sums of squares over two million ranks are exact in float64 then.
_PIECE = 16
_PIECES = 64 // _PIECE
# Words at a time, which bounds the temporary memory.
_CHECKSUM_TILE = 2**18
# Any odd number; less 2**64, since it multiplies int64. Overflow wraps, as a hash wants it.
_CHECKSUM_ODD = 0x9E3779B97F4A7C15 - 2**64


class CacheChecksum:
    """Compares, now and then, the bits of weights that several ranks cache.

    Weights that are renewed by differences are right only as long as what they are added to is the same everywhere: a
    bit that flips on one rank would stay. A 64-bit checksum travels in pieces; see [Note: equality by sums].

    Attributes:
        every: steps from one comparison to the next.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps = 0
        self.every = _CHECKSUM_EVERY

    @property
    def due(self) -> bool:
        """True if this step compares; the same on every rank."""
        return self._steps % self.every == self.every - 1 and any(buffer.base is not None for buffer in self._buffers)

    def count_step(self) -> None:
        """A step is over."""
        self._steps += 1

    @property
    def _buffers(self) -> list[FlatBuffer]:
        return [buffer for buffer in self._engine.buffers if buffer.base is not None]

    @property
    def _levels(self) -> list[int]:
        return sorted({_level(buffer) for buffer in self._buffers})

    def sums(self) -> Tensor:
        """This rank's part, float64; to be summed over all ranks. No refresh may be running."""
        rows = []
        for level in self._levels:
            buffers = [buffer for buffer in self._buffers if _level(buffer) == level]
            total = torch.zeros((), dtype=torch.int64, device=self._engine.device)
            for buffer in buffers:
                assert buffer.base is not None
                # Multiplied in between, so that the same bits in another buffer make another checksum.
                total = total * _CHECKSUM_ODD + _checksum(buffer.base)
            numbers = torch.stack([(total >> _PIECE * i) & (2**_PIECE - 1) for i in range(_PIECES)]).double()
            # A row for each slice of this level, and this rank's filled: the sum over ranks is one over those
            # that cache the slice.
            table = torch.zeros(level, 2, _PIECES, dtype=torch.float64, device=total.device)
            table[buffers[0].placement.chain.slice_index(self._engine.comm.rank, level)] = torch.stack(
                [numbers, numbers.square()]
            )
            rows.append(table.view(-1))
        return torch.cat(rows)

    def differ(self, summed: list[float]) -> bool:
        """Tell whether ranks have different checksums of one slice, from :meth:`sums` added up over all ranks."""
        values = iter(summed)
        for level in self._levels:
            copies = self._engine.comm.world // level
            for _ in range(level):
                numbers, squares = ([int(next(values)) for _ in range(_PIECES)] for _ in range(2))
                # Numbers are equal exactly when their squares' sum is as small as it can be.
                if any(copies * square != number**2 for number, square in zip(numbers, squares, strict=True)):
                    return True
        return False


def _level(buffer: FlatBuffer) -> int:
    level = buffer.placement.mode.cached
    assert level is not None  # what has a base is cached
    return level


def _checksum(values: Tensor) -> Tensor:
    """int64 of 16-bit values [n blocks of 256]: 64-bit words times odd numbers, whose sum any one word changes."""
    words = values.view(torch.int64)
    # An odd factor has an inverse modulo 2**64: no change of one word can vanish. Different ones tell words apart that
    # have changed places.
    odd = torch.arange(1, 2 * min(_CHECKSUM_TILE, words.numel()), 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHECKSUM_TILE):
        part = words[start : start + _CHECKSUM_TILE]
        total += (part * (odd[: part.numel()] + 2 * start)).sum()
    return total


# Hashes that are compared by sums over the ranks.

_Code = TypeVar("_Code", int, Tensor)
# The square of a hash has 48 bits, and sums of it over more than 32 ranks are not exact in float64. So it is summed in
# two halves.
_SQUARE_HALF = 4096


def encode_hash(code: _Code) -> list[_Code]:
    """A hash of 24 bits, and its square in two halves, to be summed over ranks in float64; [Note: equality by sums]."""
    return [code, code * code // _SQUARE_HALF, code * code % _SQUARE_HALF]


def differ(sums: Sequence[float], world: int) -> bool:
    """Tell whether ranks have different hashes, from the sums of :func:`encode_hash` over ``world`` ranks."""
    # In Python's integers, which do not round.
    total = int(sums[0])
    squares = int(sums[1]) * _SQUARE_HALF + int(sums[2])
    return world * squares != total * total


def differ_on_device(sums: Tensor, world: int) -> Tensor:
    """The answer of :func:`differ` for float64 [3], as a bool scalar on its device; no host waits."""
    total, high, low = sums.to(torch.int64).unbind()
    # Both sides wrap at 64 bits. For less than 512 ranks their difference is smaller than that; for more a wrong answer
    # would take a difference of just 2**64 or a multiple.
    return world * (high * _SQUARE_HALF + low) != total * total


# Norms.


def norm_of(square: float) -> float:
    """The norm whose square was summed over ranks."""
    return float(rounded(torch.tensor(square, dtype=torch.float64, device="cpu").sqrt()))


def rounded(norm: Tensor) -> Tensor:
    """A norm to 40 bits, which no order of summation changes: how units are cut must not show in clipped gradients."""
    mantissa, exponent = torch.frexp(norm)
    return torch.ldexp(torch.round(mantissa * 2.0**40) / 2.0**40, exponent)


def square_over(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over shards in any memories: a float64 scalar on a device, finite where all values are."""
    # Some may be the device's, and some the host's: each memory's are summed there.
    memories = dict.fromkeys(shard.device for shard in shards)
    parts = [squared_norm([shard for shard in shards if shard.device == memory]) for memory in memories]
    return torch.stack([part.to(device) for part in parts]).sum()
