"""zeropp's waits order every access to memory, and each wait is needed: without it, the simulator reports a race."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from tests.golden.runs import CASES
from tests.streams.runs import RUNS, Run, calls_of_a_step, check_reported, edited_in_groups, first_race, races
from tests.streams.seams import Seam, seams, without
from zeropp.comm.streams import Event
from zeropp.order import reductions

# For each run, the waits whose removal the simulator reports in that run.
SHOWN_BY: dict[str, list[str]] = {
    "stage 0": ["optimizer/step_sync.py PendingSum.__init__ 1", "optimizer/step_sync.py PendingSum.read_sum 1"],
    "stage 2, overlapped": [
        "access/state.py _gather_whole 1", "comm/streams.py CudaStream.run 1",
        "comm/streams.py CudaStream.run 2", "comm/streams.py CudaStream.run 3", "comm/streams.py CudaStream.run 4",
        "comm/streams.py CudaStream._call 1",
        "comm/streams.py _CudaEvent.wait 1", "comm/streams.py CommStreams.run_work 2", "comm/streams.py used_here 1",
        "order/reductions.py Reductions._await 1", "order/reductions.py Reductions.end_reductions 1",
        "order/schedule.py Transitions.unshard 1", "params/unit.py Unit.wait_for_refresh 1",
        "wire/paths.py Reduction.run 1",
    ],
    "stage 3": [
        "comm/streams.py CudaStream.free 1", "comm/streams.py CudaStream.free 2",
        "order/reductions.py Reductions.end_learning 2", "params/unit.py Unit.wait_for_unshard 1",
    ],
    "hpZ, bf16": ["comm/streams.py CommStreams.run_work 1", "order/schedule.py Transitions.issue_gather 1"],
    "qwZ, qgZ, rotated": ["wire/paths.py _Gather.run 1"],
    "LoCo, accumulated and deferred": ["params/gradient.py Gradient._add_to_held 2"],
    "MiCS": ["params/gradient.py Gradient._reduce_replicas 1"],
    "stage 1, lossless, one node": ["wire/differences.py Lossless.encode_ 1"],
    "abandoned": ["order/schedule.py Transitions.reshard 1"],
    "asked, hpZ": ["access/state.py _Loading.begin_module 1", "optimizer/wrapper.py ZeroOptimizer.load_state_dict 1"],
    "averaged": ["access/average.py Average._swap 1"],
    "compared": ["optimizer/step_sync.py StepSync._assemble 1"],
    "dropped": ["comm/streams.py CudaStream.__init__ 1"],
    "edited, hpZ": ["access/gathered.py EngineGather.scatter_edits 1"],
    "failed": ["order/reductions.py Reductions.drop_reductions 1"],
    "measured": ["order/reductions.py Reductions.send_unsent 1"],
    "parked": ["optimizer/offload_states.py offload_states 1"],
    "parked, LoCo": ["offload/parked.py Parked.__init__ 2", "params/gradient.py Gradient._add_to_held 1"],
    "twice, hpZ": [
        "engine/engine.py Engine.wait_for_refresh 1", "optimizer/wrapper.py ZeroOptimizer._take_step 1",
        "order/refresh.py Refresh.wait_for_all 2",
    ],
    "unfrozen": ["access/requires_grad.py Trainability.apply 1"],
    "states": [
        "comm/streams.py _Ended.wait 1", "comm/streams.py issued_here 1", "comm/streams.py LaunchedStream._launch 2",
        "comm/streams.py LaunchedStream._launch 3", "comm/streams.py LaunchedStream.run 1",
        "comm/streams.py _LaunchedEvent.wait 1", "comm/streams.py _LaunchedEvent.wait 2",
        "engine/engine.py Engine.require_idle 1", "params/wire_copy.py Upload.run 1",
        "order/refresh.py Refresh.wait_for_step 1",
        "params/unit.py Unit.wait_for_step 1",
    ],
    "states, hpZ, delta4": ["comm/streams.py LaunchedStream._launch 1"],
    "states, stage 1, at once": ["params/wire_copy.py WireCopy.new 1", "params/unit.py Unit.refresh 1"],
    "states, stage 1, lossless, one node": [
        "comm/streams.py EventGroup.wait 1", "order/refresh.py Refresh._choose 1", "order/refresh.py Refresh._choose 2",
    ],
    "states, stage 1, no comm streams": ["comm/streams.py InlineStream.run 1"],
    "both": ["order/refresh.py Refresh.wait_for_all 1"],
    "both, asked": [
        "engine/engine.py Engine.wait_for_step 1",
        "optimizer/host_step.py _wait 1",
        "optimizer/wrapper.py ZeroOptimizer.state 1",
    ],
    "both, edited": ["engine/engine.py Engine.forget_gradient 1"],
    "cached are read": ["engine/engine.py Engine.cached_values 1"],
    "files": [
        "offload/read_ahead.py ReadAhead._read 1", "offload/read_ahead.py PendingRead.copy_to 1",
        "optimizer/sub_groups.py SubGroupSteps.step_unit 1",
        "params/gradient.py Gradient._store_in_file 1", "params/gradient.py Gradient._store_in_file 2",
        "params/gradient.py Gradient._store_in_file 3", "optimizer/sub_groups.py _Staging.wait_for_copies 1",
    ],
    "files, pipelined": ["optimizer/sub_groups.py _begin_read 1", "params/wire_copy.py Upload.run 2"],
    "FSDP2": [
        "fsdp2/gather.py GatherRoute._send 1", "fsdp2/gather.py GatherRoute.gather 1", "fsdp2/overlap.py wait_for 1",
        "fsdp2/reduce.py ReduceComm.finish_reduction 1", "fsdp2/reduce.py ReduceComm.finish_reduction 2",
        "fsdp2/reduce.py _Packing.unpack_ 1", "fsdp2/reduce.py _with_message 1",
    ],
}  # fmt: skip
# Pairs of waits of which one is enough, because both wait for the same work or name the same stream.
EITHER: dict[tuple[str, str], str] = {
    ("comm/streams.py CudaStream.__init__ 1", "comm/streams.py CudaStream.close 1"): "hpZ, bf16",
    ("params/gradient.py Gradient._reduce_replicas 2", "params/gradient.py Gradient._reduce_replicas 3"): "MiCS",
}
# Without this wait, a thread may find no data, so an AssertionError counts as a report.
LOUD = {"order/refresh.py Refresh._choose 2": "AssertionError"}
# Waits without which no run has a race. They stay for the given reason, which the simulator does not cover or which may
# change.
REDUNDANT = {
    "access/ownership.py PreviousWeights.__init__ 1": "the old engine is closed next, which waits for the same work",
    "offload/parked.py Parked.__init__ 1": "later work on the stream waits; a wait of the host is promised to callers",
    "offload/parked.py Parked.bring_back 1": "the copy back is on the same stream, unless the caller changes streams",
    "offload/parked.py Parked.copy_of 1": "streams that read wait for the copy's stream; the host may read, too",
    "optimizer/sub_groups.py SubGroupSteps.step_unit 2": "the next tile waits before it reads; the end waits for all",
    "optimizer/wrapper.py ZeroOptimizer.close 1": "closing the step's stream also waits; this wait raises its errors",
    "params/gradient.py Gradient._store 2": "a step reads the norm first; users may read the gradient on the host",
    "params/gradient.py Gradient._store 1": "the host waits for each copy before the sum's buffer is returned",
    "order/reductions.py Reductions.end_learning 1": "for Python attributes that comm streams' threads set",
}
# Waits that no run reaches, or that protect no memory.
ELSEWHERE = {
    "comm/agreement.py Watch.look 1": "a thread that touches no memory",
    "comm/streams.py Launch.wait 1": "no thread waits for a launch; the monitor only queries its end",
    "comm/streams.py _serve 1": "used for comm streams on a CPU; LaunchedStream waits earlier",
    "offload/read_ahead.py GdsReader.read_row 1": "needs kvikio",
    "offload/transfer.py _Queue.take_piece 1": "a condition variable",
    "optimizer/host_step.py HostStep.start_step 1": "lazy_step false: step() returns after the step on the host",
    "optimizer/wrapper.py ZeroOptimizer.loss_scale 1": "reads a step's result, for which PendingSum waits",
    "optimizer/param_groups.py switch_mode 1": "needs an optimizer with modes; the same wait as Average._swap",
    "optimizer/optimizer_step.py StepResult.count_skipped 1": "reads a step's result, for which PendingSum waits",
    "optimizer/optimizer_step.py StepResult.pass_over 1": "reads a step's result, for which PendingSum waits",
    "optimizer/optimizer_step.py from_step_result 1": "reads a step's result, for which PendingSum waits",
    "optimizer/sharded_params.py _AwaitedMarker.__torch_function__ 1": "as ZeroOptimizer.state, but for torch's code",
    "optimizer/sub_groups.py _Staging.wait_for_copies 2": "runs only after an error",
    "optimizer/wrapper.py ZeroOptimizer._decide 1": "reads a step's result, for which PendingSum waits",
    "optimizer/wrapper.py ZeroOptimizer.grad_norms 1": "reads a step's result, for which PendingSum waits",
    "order/reductions.py Reductions._make_room 1": "is in a loop that ends only after the wait",
    "order/reductions.py Reductions.send_strays 1": "the same wait as end_learning 1, for gradients that arrive late",
}
# Packages and modules that are not simulated, and the reason.
APART = {
    "checkpoint/": "file I/O accesses memory by address, without an operation of torch",
    "comm/collective.py": "exchanges host integers between processes",
    "comm/process_groups.py": "exchanges host integers between processes",
    "comm/hops.py": "uses gloo, which has no streams",
    "engine/rehearsal.py": "runs collectives on communicators, which a fake group does not have",
    "comm/timers.py": "a thread that touches no memory",
    "comm/watch.py": "a thread that touches no memory",
    "deepspeed/": "tests/unit/deepspeed/test_stream_waits.py simulates it",
}
FOUND = [seam for seam in seams("**/*.py") if not seam.module.removeprefix("zeropp/").startswith(tuple(APART))]
BY_NAME: dict[str, Seam] = {seam.name: seam for seam in FOUND}
SHOWN = {name: run for run, names in SHOWN_BY.items() for name in names}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", RUNS)
def test_every_access_is_ordered(name: str, tmp_path: Path) -> None:
    assert races(RUNS[name], tmp_path) == []


def test_every_wait_is_accounted_for() -> None:
    known = [*SHOWN, *(name for pair in EITHER for name in pair), *REDUNDANT, *ELSEWHERE]
    missing = [f"{seam.module}:{seam.line}, {seam.text}, as {seam.name}" for seam in FOUND if seam.name not in known]
    assert not missing, f"add {missing} to SHOWN_BY with a run that needs it, or to another table"
    assert not [name for name in known if name not in BY_NAME], "the tables name waits that do not exist"


@pytest.mark.every(4)
@pytest.mark.parametrize("name", SHOWN)
def test_a_missing_wait_is_reported(name: str, tmp_path: Path) -> None:
    check_reported([BY_NAME[name]], RUNS[SHOWN[name]], tmp_path, loud=LOUD.get(name))


@pytest.mark.parametrize("pair", EITHER, ids=" and ".join)
def test_two_missing_waits_are_reported(pair: tuple[str, str], tmp_path: Path) -> None:
    check_reported([BY_NAME[name] for name in pair], RUNS[EITHER[pair]], tmp_path)


def test_messages_are_kept_until_streams_have_read_them(tmp_path: Path) -> None:
    """Messages are allocated on the model's stream without record_stream, so reductions must keep them alive."""
    plain = reductions._Sent

    def forget(
        reducer: reductions._Reducer, nbytes: int, message: Tensor, onward: int, read: Event, end: Event
    ) -> reductions._Sent:
        reducer.gradient.free_message(message)
        return plain(reducer, nbytes, None, onward, read, end)

    with mock.patch.object(reductions, "_Sent", forget):
        found = races(RUNS["stage 2, overlapped"], tmp_path)
    assert found and all("may be reused before" in race for race in found)


def test_edits_in_the_groups_may_overtake_a_refresh(tmp_path: Path) -> None:
    """The only accepted race: a refresh may read a weight while the caller edits it in the parameter groups.

    The mixed value is not used, because the edit starts a new refresh. See
    `zeropp.optimizer.host_step.waits_for_weights`.
    """
    (race,) = races(Run(CASES["hpZ, bf16"], [edited_in_groups]), tmp_path)
    assert race.startswith("write by the model's stream") and "does not wait for read by comm stream" in race


@pytest.mark.campaign
@pytest.mark.parametrize("name", REDUNDANT)
def test_waits_listed_as_redundant_are_redundant(name: str, tmp_path: Path) -> None:
    for run in RUNS:
        found = first_race(RUNS[run], tmp_path, without(BY_NAME[name]), late=0.003)
        assert found == "", f"{run} needs this wait: move it to SHOWN_BY"


# Run and number of ranks -> calls of zeropp's own functions for one unit and step, with Python 3.11.
CALLS_OF_A_UNIT = {
    ("stage 3", 1): 164,
    ("stage 3", 4): 230,
    ("hpZ, bf16", 4): 317,
    ("hpZ, bf16, delta4, qgZ", 4): 338,
}


@pytest.mark.parametrize(("name", "world"), CALLS_OF_A_UNIT)
def test_calls_of_the_code_path_for_gpus(name: str, world: int, tmp_path: Path) -> None:
    run = RUNS[name]
    assert isinstance(run, Run)
    few, many = (calls_of_a_step(replace(run, world=world), tmp_path, blocks) for blocks in (4, 14))
    assert (many - few) / 10 <= 1.1 * CALLS_OF_A_UNIT[name, world]
