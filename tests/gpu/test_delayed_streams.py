"""Delayed comm streams and delayed computation change no bit of the results; a removed wait changes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.delays import Delays, train

CARD = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CARD]
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "nothing kept": {"reuse": 0, "prefetch": 0},
    "one unit at a time": {"reuse": 0, "live": 0},
    "bf16": {"bf16": {"enabled": True}, "reuse": 0},
    "stage 1 bf16": {"stage": 1, "overlap_comm": True, "bf16": {"enabled": True}},
}
KINDS = ("gather", "reduce", "refresh")


def used(settings: dict[str, Any]) -> set[str]:
    """Return the kinds of comm streams with work: stage 1 refreshes full weights after a step and never gathers."""
    return {"refresh", "reduce"} if settings.get("stage") == 1 else {"gather", "reduce"}


@pytest.mark.every(8)
@pytest.mark.parametrize("late", ["streams", "computing", "both"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("device", DEVICES)
def test_no_bit_changes(device: str, name: str, late: str) -> None:
    expected = train(device, SETTINGS[name])
    assert expected.differs(train(device, SETTINGS[name])) == [], "two runs without delays differ"
    delays = Delays(device, comm_streams=KINDS if late != "computing" else (), computing=late != "streams")
    assert expected.differs(train(device, SETTINGS[name], delays)) == []
    there = (used(SETTINGS[name]) if late != "computing" else set()) | ({"computing"} if late != "streams" else set())
    assert there <= set(delays.slept), "nothing was late"


@pytest.mark.parametrize("name", ["nothing kept", "stage 1 bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_sums_that_no_host_waits_for(device: str, name: str) -> None:
    """With a fused optimizer the device skips the step with a NaN loss, although the host reads the sum later."""
    expected = train(device, SETTINGS[name], late=False)
    assert expected.norms[1] == 1.0
    for delays in (None, Delays(device, comm_streams=KINDS, computing=True)):
        assert expected.differs(train(device, SETTINGS[name], delays, late=True)) == []


@pytest.mark.parametrize(
    ("device", "kind", "name"),
    [
        ("cpu", "refresh", "stage 1 bf16"),
        pytest.param("cuda", "reduce", "stage 3", marks=pytest.mark.gpu),
        # Neither is tested on CPU: a thread without a wait would use memory that was already freed.
        pytest.param("cuda", "gather", "nothing kept", marks=pytest.mark.gpu),
        pytest.param("cuda", "refresh", "stage 1 bf16", marks=pytest.mark.gpu),
    ],
)
def test_work_that_nobody_waits_for_shows(device: str, kind: str, name: str) -> None:
    expected = train(device, SETTINGS[name])
    delays = Delays(device, comm_streams=KINDS, unwaited=(kind,))
    assert expected.differs(train(device, SETTINGS[name], delays)), "the delay is too short to tell"


@pytest.mark.gpu
def test_a_stream_that_does_not_wait_for_the_model_shows() -> None:
    """A reduce stream that does not wait for the model packs gradients too early. On CPU issued work is always done."""
    expected = train("cuda", SETTINGS["stage 3"])
    delays = Delays("cuda", computing=True, unordered=("reduce",))
    assert expected.differs(train("cuda", SETTINGS["stage 3"], delays))
