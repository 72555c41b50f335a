"""Sums and printed text of the traffic ledger."""

from __future__ import annotations

from zeropp.comm.hops import Ledger, TrafficKey

GATHER = TrafficKey("block", "gather", "4->2", "cross", 2, "int8")
INSIDE = TrafficKey("block", "gather", "2->1", "local", 2, "int8")
REDUCE = TrafficKey("block", "reduce", "1->2", "local", 2, "feedback(int4)")
CONTROL = TrafficKey("<boundary>", "control", "all", "all", 4, "-")


def filled() -> Ledger:
    ledger = Ledger()
    for way, nbytes in ((GATHER, 1000), (GATHER, 1000), (INSIDE, 30), (REDUCE, 7), (CONTROL, 5)):
        ledger.count_call(way, nbytes)
    ledger.add_wait("block", "gather", 0.25)
    ledger.add_wait("block", "gather", 0.5)
    ledger.count_event("block", "refresh: whole")
    ledger.count_event("other", "refresh: whole")
    return ledger


def test_calls_bytes_and_waiting_add_up() -> None:
    ledger = filled()
    rows = {(row.unit, row.kind, row.hop): (row.calls, row.bytes, row.exposed) for row in ledger.rows}
    assert rows == {
        ("block", "gather", "4->2"): (2, 2000, 0.75),  # waits are counted once per kind, in the row of its slowest link
        ("block", "gather", "2->1"): (1, 30, 0.0),
        ("block", "reduce", "1->2"): (1, 7, 0.0),
        ("<boundary>", "control", "all"): (1, 5, 0.0),
    }
    assert ledger.total_bytes == 2042
    assert ledger.bytes_by_link() == {"cross": 2000, "local": 37, "all": 5}
    assert ledger.bytes_by_hop() == {"gather 4->2 int8": 2000, "gather 2->1 int8": 30, "reduce 1->2 feedback(int4)": 7}


def test_the_printed_ledger_has_rows_a_total_and_events() -> None:
    *rows, total, event = str(filled()).splitlines()
    assert " ".join(rows[0].split()) == "unit kind hop link ranks codec calls bytes sent exposed s"
    assert ["block", "gather", "4->2", "cross", "2", "int8", "2", "2,000", "0.750"] in [row.split() for row in rows]
    assert ["block", "gather", "2->1", "local", "2", "int8", "1", "30"] in [row.split() for row in rows]
    assert total.split() == ["total", "2,042"]
    assert event == "refresh: whole: 2 times"


def test_reset_forgets_everything() -> None:
    ledger = filled()
    ledger.reset()
    assert (ledger.rows, ledger.total_bytes, dict(ledger.events)) == ([], 0, {})
    assert len(str(ledger).splitlines()) == 2
