"""One-line faults in zeropp.order, each of which the tests of the order must detect."""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["FAULTS", "Fault"]

# The modules that import names from zeropp.order; a faulty module must replace these names there.
_USERS = ("tests.order.rank", "zeropp.order.schedule", "zeropp.order.reductions")


@dataclass(frozen=True)
class Fault:
    """A text that occurs once in a module of ``zeropp.order``, and the text that replaces it."""

    module: str
    text: str
    instead: str

    def put_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make simulated ranks use the faulty module."""
        sound = importlib.import_module(f"zeropp.order.{self.module}")
        assert sound.__file__ is not None
        source = Path(sound.__file__).read_text()
        assert source.count(self.text) == 1, f"{self.text!r} occurs {source.count(self.text)} times in {self.module}"
        faulty = types.ModuleType(sound.__name__)
        monkeypatch.setitem(sys.modules, sound.__name__, faulty)  # dataclasses look up their module here
        exec(compile(source.replace(self.text, self.instead), f"faulty {self.module}", "exec"), faulty.__dict__)
        for user in map(importlib.import_module, _USERS):
            for name in sound.__all__:
                if getattr(user, name, None) is getattr(sound, name):
                    monkeypatch.setattr(user, name, getattr(faulty, name))


def _in(module: str, **faults: tuple[str, str]) -> dict[str, Fault]:
    return {name.replace("_", " "): Fault(module, *texts) for name, texts in faults.items()}


FAULTS: dict[str, Fault] = {
    **_in(
        "schedule",
        no_word_after_a_failure=("        if self._failed:\n", "        if False:\n"),
        no_exchange_after_a_failure=(
            'self.agreement.exchange(_AGAIN, [], f"starting {what} after an error")',
            "pass",
        ),
        a_failure_is_never_over=("            self._failed = False\n", ""),
        planned_units_outlast_a_failure=(
            "        self.live_units.release_planned()\n        self.live_units.release_re",
            "        self.live_units.release_re",
        ),
        phases_are_not_told_apart=("(self._ended, of)", "0"),
        phases_of_a_kind_are_not_told_apart=("(self._ended, of)", "of"),
        strays_are_left_to_the_boundary=(
            'strays = unit is None and phase.key[0] == "backward" and self.reductions.has_stray()',
            "strays = False",
        ),
        only_one_rank_tells_where_backward_may_come=(
            "self.known.expect_in_backward(units)",
            "self.known.expect_in_backward(accounts[0][0])",
        ),
        reductions_sent_for_another_order_keep_their_places=("self.reductions.forget_sent(since)", "pass"),
        held_gradients_change_every_backward=(" and key[1] is not None and not (held and key[1])", ""),
        units_gathered_in_vain_are_kept=("        if since < place:", "        if False:"),
        units_used_twice_are_forgotten=(
            "self.reductions.reused.update(unit for unit, uses in Counter(phase.learned).items() if uses > 1)",
            "pass",
        ),
        differences_are_not_told_at_the_boundary=("for key in self._recent if anywhere else ():", "for key in ():"),
        ranks_that_differ_are_not_mixed=(
            "mixed = any((own, paths) != (each[0], each[2]) for *_, each, _ in accounts)",
            "mixed = False",
        ),
        reductions_are_not_sent_at_a_fork=("        self.reductions.before_use(place)\n", ""),
        units_gathered_for_others_are_released=(
            "if own is not None and (used != own or",
            "if False and (used != own or",
        ),
        backwards_are_refused_in_which_nobody_asks=(
            "            self._follow(expected, 0)\n",
            '            if self._ended > 9 and key[0] == "backward" and not self.known.may_vary(key, expected):\n'
            '                raise self.agreement.failure("refused for no reason")\n'
            "            self._follow(expected, 0)\n",
        ),
        units_that_run_again_are_released=(
            "if order is not None and order.find(unit.index, self._phase.position) is None:",
            "if 0:",
        ),
        each_rank_renews_in_an_order_of_its_own=(
            "enumerate(uses)",
            "enumerate(self._phase.own)",
        ),
        uses_of_units_still_gathered_are_not_reported=("self.passed_over |= unit.users == 1", "pass"),
        second_uses_of_retained_units_are_not_reported=("self.passed_over |= once_more", "pass"),
        forwards_that_gather_nothing_count=(
            "        if not phase.silent:\n            self._recent",
            "        if True:\n            self._recent",
        ),
        calls_are_not_counted=("phase.counted = position == 0 and", "phase.counted = False and"),
        units_run_without_the_module_around_them_are_released=("-1 if usual else _KEEP", "-1"),
        modules_that_run_for_the_first_time_are_told_nobody=(
            "phase.novel |= call not in",
            "phase.novel = False and call not in",
        ),
        calls_to_come_are_not_counted=("self.live_units.due.update(", "({}).update("),
        a_rank_that_may_run_more_again_lets_go=("in more.items():", "in ():"),
        nothing_is_left_out_where_ranks_part=("list(phase.order.uses[:since])", "list(phase.order.uses)"),
    ),
    **_in(
        "reductions",
        work_in_flight_begins_again=("None if reducer.in_flight else reducer.work", "reducer.work"),
        reductions_sent_in_vain_are_expected_again=("vain = self._doubtful.difference(fires)", "vain = set()"),
        the_first_of_two_places_is_remembered=("self._done.pop(index, None)", "pass"),
        a_unit_is_complete_that_misses_nothing=(
            "return all(e or not t for e, t in zip(",
            "return True or all(e or not t for e, t in zip(",
        ),
        failed_messages_are_not_waited_for=(
            "        self.begin_reductions(None)\n        self.wait_for_reductions(0)\n",
            "        self.begin_reductions(None)\n",
        ),
        offers_of_one_rank_are_taken=("all(index in offered for offered in offers)", "True"),
        reductions_are_sent_twice=(" if unit not in self._done)", ")"),
        places_are_those_of_the_order_before=("max(uses, self._uses)", "uses"),
    ),
    **_in(
        "known_orders",
        backwards_do_not_vary_with_forwards=(
            "if any(self._known[part].varies for part in key if",
            "if any(False for part in key if",
        ),
        units_that_nobody_has_used_are_no_reason=(
            "return not self._reach(key).units.issubset(order.uses)",
            "return False",
        ),
        forwards_that_gather_nothing_are_learned=(
            "            self.remember(key, CollectiveOrder())\n",
            "            pass\n",
        ),
        modules_that_nobody_has_run_are_no_reason=("if known.varies or known.unseen or", "if known.varies or"),
        a_forward_that_was_left_out_is_no_reason=("known.unseen or known.partial or", "known.unseen or"),
        modules_run_more_often_in_another_mode_are_no_reason=("or not branched <= called", ""),
        calls_that_may_run_again_are_no_reason=("return self._may_run_more_again(key, order)", "return False"),
        forwards_outlast_a_change_of_trained_parameters=('if not (key[0] == "forward" and key[-1])', ""),
        forks_are_where_nothing_parts=("places = {_common(order.uses, other.uses) for", "places = {0 for"),
    ),
}
