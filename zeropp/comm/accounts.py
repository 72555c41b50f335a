"""Ranks' accounts of themselves when waiting takes long, and their likely meaning. Words only, no process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from zeropp.comm.groups import name_ranks

__all__ = ["Account", "by_text", "explain", "likely_cause"]


@dataclass(frozen=True)
class Account:
    """One rank's account of itself.

    Attributes:
        doing: in the words of an error, after "rank 0 was".
        call: the collective call of the user that it has come to, "state_dict() of a GPT", or "".
        where: the pass or step that it is in, "a backward", or "".
        until: what ended it, ", until ...", or "".
        failure: what went wrong on this rank itself, or "".
        unsure: the failure may have kept weights from being stepped here.
        beyond: what it does that no rank has done before, so that nobody waits for it, or "".
        other_model: it is in a pass or call of another model than the rank that reads this.
    """

    doing: str
    call: str = ""
    where: str = ""
    until: str = ""
    failure: str = ""
    unsure: bool = False
    beyond: str = ""
    other_model: bool = False

    def __str__(self) -> str:
        # What a rank does often names it already ("starting a forward").
        inside = f" in {self.where}" if self.where and self.where not in self.doing else ""
        return f"{'using another model, ' if self.other_model else ''}{self.doing}{inside}{self.until}"

    def packed(self) -> str:
        """Its text for the job's store."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpacked(text: str | bytes) -> Account:
        """The inverse of :meth:`packed`."""
        return Account(**json.loads(text))


def explain(accounts: Mapping[int, Account], world: int) -> str:
    """The likely cause, then each account: "rank 0 called ... alone; .... rank 0 was ...; rank 1 was ..."."""
    groups = by_text({rank: str(account) for rank, account in accounts.items()})
    said = "; ".join(f"{name_ranks(of)} {'was' if len(of) == 1 else 'were'} {text}" for text, of in groups.items())
    silent = _silent(accounts, world)
    if silent:
        said += f"; {name_ranks(silent)} said nothing"
    return f"{likely_cause(accounts, world)}. The ranks are no longer in step: {said}"


def likely_cause(accounts: Mapping[int, Account], world: int) -> str:
    """The thing that the user most probably has to look at, in a sentence without its full stop."""
    # Most telling first: what one rank knows to be wrong explains the rest, and calls of the user that differ explain
    # silence and different phases, and not the other way round.
    failures = by_text({rank: account.failure for rank, account in accounts.items() if account.failure})
    if failures:
        return " and ".join(f"{name_ranks(ranks)} failed: {failure}" for failure, ranks in failures.items())
    beyond = by_text({rank: account.beyond for rank, account in accounts.items() if account.beyond})
    if beyond:
        parts = " and ".join(f"{name_ranks(ranks)} alone {text}" for text, ranks in beyond.items())
        once = "If all ranks have done so in one pass, as in a first step, each of them may do so alone"
        return f"{parts}; the other ranks cannot know of it, and do not wait there. {once}"
    silent = _silent(accounts, world)
    calls = by_text({rank: account.call for rank, account in accounts.items() if account.call})
    if len(calls) > 1:
        parts = " and ".join(f"{name_ranks(ranks)} called {call}" for call, ranks in calls.items())
        return f"{parts}; they are collective: every rank makes the same calls in the same order"
    for call, ranks in calls.items():
        others = set(range(world)).difference(ranks)
        # The fewer ranks are the more likely culprits; in a draw, those that made the call.
        if others and len(ranks) <= len(others):
            return f"{name_ranks(ranks)} called {call} alone; it is collective: every rank calls it"
        if others:
            return f"{name_ranks(others)} did not call {call}, which is collective: every rank calls it"
    if silent:
        does = "does" if len(silent) == 1 else "do"
        return (
            f"{name_ranks(silent)} {does} not wait for others: failed or ended, out of data, slow, or in code that "
            "only some ranks run"
        )
    elsewhere = [rank for rank, account in accounts.items() if account.other_model]
    if elsewhere:
        verb = "uses" if len(elsewhere) == 1 else "use"
        return f"{name_ranks(elsewhere)} {verb} another model; every rank uses its models in the same order"
    places = by_text({rank: account.where for rank, account in accounts.items()})
    if len(places) > 1:
        parts = ", ".join(f"{name_ranks(ranks)} in {where or 'no pass'}" for where, ranks in places.items())
        return f"the ranks made different forwards, backwards or steps, or numbers of them: {parts}"
    if len(by_text({rank: account.doing for rank, account in accounts.items()})) > 1:
        return "the ranks ran different modules, or in another order; look for code that depends on the rank"
    return "all ranks wait for each other at the same place: a connection or a device may be stuck"


def _silent(accounts: Mapping[int, Account], world: int) -> list[int]:
    return [rank for rank in range(world) if rank not in accounts]


def by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Ranks by what they say, in ascending order."""
    found: dict[str, list[int]] = {}
    # Ranks in ascending order, so that the same accounts give the same words on every rank.
    for rank in sorted(texts):
        found.setdefault(texts[rank], []).append(rank)
    return found
