"""The error text made from the status reports of all ranks names the likely cause first, in plain words."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from zeropp.comm.process_groups import gather_rows, name_ranks, what_ended
from zeropp.comm.streams import ThreadStream
from zeropp.comm.watch import RankStatus, explain, likely_cause
from zeropp.order.known_orders import describe_phase

FORWARD, EVALUATION = "a forward with gradients", "a forward without gradients, in eval mode"
ALONE = "rank 0 called state_dict() of a GPT alone; it is collective: every rank calls it"
SAVING = RankStatus("at state_dict() of a GPT", call="state_dict() of a GPT")
WAITING = RankStatus("waiting for the gather of unit 'blocks.0'", where=FORWARD)


@pytest.mark.parametrize(
    ("accounts", "world", "cause"),
    [
        ({0: SAVING, 1: WAITING}, 2, ALONE),
        ({0: SAVING}, 4, ALONE),
        (
            {0: SAVING, 1: SAVING, 3: SAVING, 2: WAITING},
            4,
            "rank 2 did not call state_dict() of a GPT, which is collective: every rank calls it",
        ),
        (
            {0: SAVING, 1: RankStatus("at full_state()", call="full_state()")},
            2,
            "rank 0 called state_dict() of a GPT and rank 1 called full_state(); they are collective: every rank makes "
            "the same calls in the same order",
        ),
        (
            {0: WAITING},
            3,
            "ranks 1 and 2 do not wait for others: failed or ended, out of data, slow, or in code that only some ranks "
            "run",
        ),
        (
            {0: RankStatus("waiting", where=EVALUATION), 1: WAITING},
            2,
            "the ranks made different forwards, backwards or steps, or numbers of them: rank 0 in a forward without "
            "gradients, in eval mode, rank 1 in a forward with gradients",
        ),
        (
            {0: WAITING, 1: RankStatus("asking for unit 'head'", where=FORWARD)},
            2,
            "the ranks ran different modules, or in another order; look for code that depends on the rank",
        ),
        (
            {0: WAITING, 1: RankStatus("asking for unit 'head'", where=FORWARD, beyond="runs a module more often")},
            2,
            "rank 1 alone runs a module more often; the other ranks do not expect it and do not wait there. "
            "After a pass in which all ranks did so, such as the first step, one rank alone may do so",
        ),
        (
            {0: WAITING, 1: WAITING},
            2,
            "all ranks wait for each other at the same place: a connection or a device may be stuck",
        ),
    ],
)
def test_likely_causes(accounts: dict[int, RankStatus], world: int, cause: str) -> None:
    assert likely_cause(accounts, world) == cause
    assert explain(accounts, world).startswith(f"{cause}. The ranks are no longer in step: ")


def test_accounts_of_ranks_that_say_the_same_are_one() -> None:
    text = explain({0: SAVING, 1: WAITING, 2: WAITING}, 5)
    assert text.endswith(
        "rank 0 was at state_dict() of a GPT; ranks 1 and 2 were waiting for the gather of unit 'blocks.0' in a "
        "forward with gradients; ranks 3 and 4 reported nothing"
    )


def test_phases_in_words() -> None:
    assert describe_phase(("forward", "", True, True)) == "a forward with gradients"
    assert describe_phase(("forward", "head", False, False)) == "a forward of 'head' without gradients, in eval mode"
    assert describe_phase(("backward", False, 3, ("forward", "", True, True))) == "a backward"
    parts = [("forward", path, True, True) for path in ("encoder", "")]
    assert describe_phase(("backward", False, 3, *parts)) == "a backward after forwards of 'encoder', the model"


def test_names_of_ranks() -> None:
    assert [name_ranks([3]), name_ranks([2, 0, 1])] == ["rank 3", "ranks 0, 1 and 2"]
    assert name_ranks(range(1000)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"


def test_accounts_travel() -> None:
    assert RankStatus.unpacked(WAITING.packed().encode()) == WAITING


class Group:
    """A stand-in for a process group of two ranks in which receiving from the other rank raises a given error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def recv(self, *args: object) -> object:
        raise self._error


class CompilerError(RuntimeError):
    pass


LATE, GONE = "[gloo/buffer.cc:78] Timed out waiting 2000ms for recv", "[gloo/pair.cc:5] Connection closed by peer"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(LATE), "time ran out"),
        (RuntimeError(GONE), "a connection to another rank was closed"),
        (RuntimeError("sizes differ"), None),
        (CompilerError(LATE), None),
    ],
)
def test_the_reason_of_an_error_of_a_collective(error: Exception, reason: str | None) -> None:
    with pytest.raises(RuntimeError) as caught:
        gather_rows(torch.zeros(1), Group(error), timedelta(seconds=1))  # type: ignore[arg-type]
    assert what_ended(caught.value) == reason
    told = RuntimeError(str(error))
    told.__cause__ = error
    with pytest.raises(RuntimeError) as caught:
        gather_rows(torch.zeros(1), Group(told), timedelta(seconds=1))  # type: ignore[arg-type]
    assert what_ended(caught.value) is None


@pytest.mark.parametrize("error", [RuntimeError(LATE), RuntimeError(GONE), CompilerError(LATE)])
def test_an_error_of_other_code_has_no_such_reason(error: Exception) -> None:
    with pytest.raises(RuntimeError) as caught:
        raise error
    assert what_ended(caught.value) is None


def test_an_error_of_other_code_on_a_stream_has_no_such_reason() -> None:
    def work() -> None:
        raise RuntimeError(LATE)

    comm_stream = ThreadStream("test")
    with pytest.raises(RuntimeError, match="Timed out") as caught:
        comm_stream.run(work).wait(60)
    comm_stream.close()
    assert what_ended(caught.value) is None


def test_errors_that_torch_distributed_has_types_for() -> None:
    assert what_ended(torch.distributed.DistStoreError("wait timed out")) == "time ran out"
    assert what_ended(torch.distributed.DistBackendError("NCCL says no")) is None
