"""bench/step_time does not report unequal work, its tables name machine and world size, and its arms train alike."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from text_data import on_device
from torch import nn

import zeropp
from bench.common import RATE, WARM_UP, machine, peak_rate
from bench.common.contestant import Contestant
from bench.step_time import report
from bench.step_time.__main__ import parse_arguments
from bench.step_time.deepspeed_system import _Stepper
from bench.step_time.launch import rank_command
from bench.step_time.systems import MainWeights, MemoryMeter, build
from examples.text_data import Batches

ARMS = ("fsdp2", "fsdp2_clipped", "zeropp", "zeropp_clipped")


def measured(dtype: str = "bf16", *flags: str) -> dict[str, Any]:
    """Return invented results of four systems that do equal work."""
    arm: dict[str, Any] = {
        "step_s": [0.2, 0.2], "host_s": [0.1, 0.1], "cpu_s": [0.1, 0.1], "losses": [5.5, 5.0, 4.5, 4.0], "norms": None,
        "wire_bytes": None, "weights_apart": 0.0, "weights_way": 1.0,
    }  # fmt: skip
    ours = {"ledger_bytes": 0, "gathers_per_step": {"a 2->1": 2.0}, "kept_after_forward": [], "predicted_bytes": {}}
    systems = {name: {**copy.deepcopy(arm), **(copy.deepcopy(ours) if "zeropp" in name else {})} for name in ARMS}
    for name in ("fsdp2_clipped", "zeropp_clipped"):
        systems[name]["norms"] = [4.0, 2.0, 1.5, 0.5]
    found: dict[str, Any] = {"systems": systems, "wire": "not counted", "tcp": "cubic", "card": {}}
    report.complete(found, parse_arguments([f"--systems={','.join(ARMS)}", f"--dtype={dtype}", *flags]))
    return found


def test_clipped_arms_are_compared_with_the_clipped_fsdp2() -> None:
    found = measured()
    found["systems"]["fsdp2_clipped"]["step_s"] = [0.4, 0.4]
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in report.markdown(found).splitlines()}
    assert (rows["zeropp"][2], rows["zeropp_clipped"][2]) == ("1.000", "0.500")
    assert report.counterpart("zeropp_clipped", ["ddp", "zeropp", "zeropp_clipped"]) == "zeropp_clipped"
    assert report.counterpart("zeropp_clipped", ["fsdp2", "zeropp_clipped", "fsdp2_clipped"]) == "fsdp2_clipped"


@pytest.mark.parametrize(
    ("arm", "key", "value", "words"),
    [
        ("zeropp_clipped", "losses", [5.5, 5.1, 4.5, 4.0], "losses of zeropp_clipped and fsdp2_clipped differ"),
        ("zeropp_clipped", "losses", [5.5, float("nan"), 4.5, 4.0], "losses of zeropp_clipped and fsdp2_clipped"),
        ("zeropp_clipped", "norms", [4.0, 2.2, 1.5, 0.5], "norms of zeropp_clipped and fsdp2_clipped differ"),
        ("zeropp", "weights_apart", 0.25, "weights of zeropp end 2.50e-01 of their way from those of fsdp2"),
        ("zeropp", "weights_apart", float("nan"), "weights of zeropp end nan"),
        (
            "zeropp",
            "weights_way",
            0.8,
            "weights of zeropp have gone 8.00e-01 from where they began, those of fsdp2 1.0",
        ),
        ("zeropp_clipped", "weights_way", float("nan"), "weights of zeropp_clipped have gone nan"),
        ("zeropp_clipped", "kept_after_forward", ["a"], "zeropp_clipped kept weights"),
        ("zeropp_clipped", "gathers_per_step", {"a 2->1": 1.0}, "zeropp_clipped's ledger has units not gathered"),
    ],
)
def test_unequal_work_is_not_reported(arm: str, key: str, value: object, words: str) -> None:
    found = measured()
    assert report.problems(found) == []
    found["systems"][arm][key] = value
    (problem,) = report.problems(found)
    assert problem.startswith(words)


AGAIN = "fsdp2_clipped_again"


def with_yardstick(apart: float) -> dict[str, Any]:
    """Return the same results with a second FSDP2 on reversed rows, whose weights are ``apart`` from FSDP2's."""
    found = measured()
    found["systems"][AGAIN] = {**copy.deepcopy(found["systems"]["fsdp2_clipped"]), "weights_apart": apart}
    return found


@pytest.mark.parametrize(
    ("yardstick", "apart", "bound"),
    [
        (0.08, 0.2, None),
        (0.08, 0.25, "0.24"),
        (1e-4, 0.02, None),
        (1e-4, 0.05, "0.03"),
        (0.08, float("nan"), "0.24"),
    ],
)
def test_the_bound_of_weights_is_fsdp2_s_distance_from_itself(yardstick: float, apart: float, bound: str) -> None:
    found = with_yardstick(yardstick)
    found["systems"]["zeropp_clipped"]["weights_apart"] = apart
    problems = report.problems(found)
    assert bool(problems) == (bound is not None)
    if bound is not None:
        assert problems[0].startswith("weights of zeropp_clipped end") and problems[0].endswith(f"more than {bound}")
    else:
        text = report.markdown(found)
        assert f"| {apart:.1e} ({max(0.03, 3 * yardstick):.1e}) |" in text and "rows in reverse order" in text


def test_a_yardstick_without_a_number_is_a_problem_and_loosens_no_bound() -> None:
    found = with_yardstick(float("nan"))
    (problem,) = report.problems(found)
    assert problem.startswith(f"weights of {AGAIN} end nan")
    assert report.weight_bound("zeropp_clipped", found) == report.WEIGHT_FLOOR["bf16"]


def test_runs_that_diverge_by_themselves_are_a_problem() -> None:
    """If the two FSDP2 systems diverge, nothing can be concluded from differences of other systems."""
    (problem,) = report.problems(with_yardstick(0.4))
    assert problem.startswith(f"weights of {AGAIN} end 4.00e-01") and problem.endswith("more than 0.1")


def test_a_yardstick_says_nothing_of_arms_that_clip_otherwise() -> None:
    found = with_yardstick(0.08)
    found["systems"]["zeropp"]["weights_apart"] = 0.2
    (problem,) = report.problems(found)
    assert problem.startswith("weights of zeropp end") and problem.endswith("more than 0.1")
    assert report.counterpart(AGAIN, list(found["systems"])) == "fsdp2_clipped"


SIZES = ("--layers=2", "--d-model=32", "--heads=2", "--seq-len=8", "--vocab=300", "--ranks=1")


def built(name: str, *flags: str) -> Contestant:
    text = torch.arange(4000).remainder(251).to(torch.uint8)
    args = parse_arguments([*SIZES, *flags])
    with mock.patch("torch.distributed.get_world_size", return_value=1):  # because there is no process group
        return build(name, args, torch.device("cpu"), Batches(text, args.batch, args.seq_len))


@pytest.mark.parametrize("name", ["plain_clipped", "zeropp_clipped"])
def test_the_rate_rises_over_the_first_steps_and_then_stays(name: str) -> None:
    contestant = built(name, "--dtype=bf16")
    contestant.rate = 0.01
    rates = []
    for _ in range(WARM_UP + 2):
        contestant.one_step()
        rates.append(contestant.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.01 * min(step, WARM_UP) / WARM_UP for step in range(1, WARM_UP + 3)])
    assert torch.stack(contestant.losses)[-1] < contestant.losses[0]
    assert (peak_rate(384), peak_rate(96), peak_rate(2048)) == (RATE, RATE, pytest.approx(RATE * 384 / 2048))
    assert built(name).rate == RATE


def test_deepspeed_s_engine_takes_rates_and_tells_norms() -> None:
    engine = mock.Mock(spec=nn.Module, optimizer=mock.Mock(param_groups=[{"lr": RATE}]), step=mock.Mock())
    engine.get_global_grad_norm = lambda: torch.tensor(1.5)
    contestant = Contestant("deepspeed_clipped", engine, _Stepper(engine), None, torch.device("cpu"), clip=1.0)  # type: ignore[arg-type]
    contestant.finish_step(torch.ones(()))
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(RATE / WARM_UP)
    assert contestant.norms == [1.5] and engine.step.call_count == 1
    with mock.patch.dict(sys.modules, {"deepspeed": None}), pytest.raises(SystemExit, match="DeepSpeed is not install"):
        built("deepspeed_clipped")


def test_plain_trains_main_weights_whose_rounded_copies_compute() -> None:
    """Fp32 has one set of weights. Bf16 has fp32 main weights and rounded copies; main gradients are fp32."""
    whole, rounded = built("plain"), built("plain", "--dtype=bf16")
    assert type(whole.optimizer) is torch.optim.AdamW and isinstance(rounded.optimizer, MainWeights)
    for contestant in (whole, rounded):
        for _ in range(3):
            contestant.one_step()
    main = rounded.optimizer.param_groups[0]["params"]
    assert {each.dtype for each in main} == {torch.float32}
    for weight, copied in zip(main, rounded.model.parameters(), strict=True):
        assert torch.equal(weight.bfloat16(), copied) and copied.grad is None
    assert rounded.before is not None and not torch.equal(rounded.samples(), rounded.before)
    assert torch.allclose(rounded.samples(), whole.samples(), atol=2e-3)
    with pytest.raises(SystemExit):
        parse_arguments(["--systems=plain", "--ranks=2"])


def test_rows_in_reverse_order_are_the_same_batch() -> None:
    forward, again = (built(name).batches.at(3) for name in ("plain", "plain_again"))
    assert all(torch.equal(one.flip(0), other) for one, other in zip(forward, again, strict=True))


def test_flags_of_the_model_reach_ranks_and_every_block() -> None:
    with mock.patch.object(nn.Module, "compile") as compiled:
        contestant = built("zeropp", "--compiled")
    assert compiled.call_count == 2 and isinstance(contestant.optimizer, zeropp.ZeroOptimizer)
    assert contestant.model.embedding.num_embeddings == 300
    command, _ = rank_command(parse_arguments([*SIZES, "--compiled"]), Path("result"), "not counted")
    assert "--vocab=300" in command and "--compiled" in command


def test_arms_that_clipped_nothing_are_not_reported() -> None:
    found = measured()
    for name in ("fsdp2_clipped", "zeropp_clipped"):
        found["systems"][name]["norms"] = [0.9, 0.8, 0.7, 0.5]
    assert [problem.split(":")[0] for problem in report.problems(found)] == [
        "fsdp2_clipped clipped nothing",
        "zeropp_clipped clipped nothing",
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_table_states_its_tolerances_and_versions(dtype: str) -> None:
    found = measured(dtype, "--ranks=1")
    text = report.markdown(found)
    assert "weights apart, at the end and as a share of the way that they have gone, at most " in text
    assert f"{report.WEIGHT_TOLERANCE[dtype]:g}." in text and f"within {report.NORM_TOLERANCE[dtype]:g} of them" in text
    assert f"torch {torch.__version__}, Triton {found['machine']['triton']}" in text
    assert machine.processor() in text


def test_a_table_of_one_rank_states_that_it_shows_no_collectives() -> None:
    assert "It cannot show collectives" in report.markdown(measured("bf16", "--ranks=1"))
    assert "It cannot show collectives" not in report.markdown(measured())


def nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a fake ``nvidia-smi`` that runs ``script`` first on PATH."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_driver_and_clocks_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "A card, 580.1, 1980, 1980, 2619, 2619, 700.00, 81559"
    nvidia_smi(tmp_path, f'echo "$@" > {tmp_path}/asked; echo "{line}"', monkeypatch)
    about = machine.machine("cuda")
    assert f"--query-gpu={','.join(machine.CARD)}" in (tmp_path / "asked").read_text()
    text = machine.describe(about)
    assert text.startswith("A card, ") and "driver 580.1, SM MHz 1980, SM MHz at most 1980, memory MHz 2619" in text
    assert "driver" not in machine.machine("cpu")


@pytest.mark.parametrize(
    ("script", "reason"), [("exit 9", "exit status 9"), ("echo '[Not Supported]'", "argument"), ("true", "range")]
)
def test_a_card_that_says_nothing_is_no_error(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path, script, monkeypatch)
    assert reason in machine.card()["driver"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert machine.card()["driver"] == "unknown: there is no nvidia-smi"


def test_inputs_go_to_a_card_from_pinned_memory_without_waiting() -> None:
    calls: list[tuple[str, object]] = []
    tensors = torch.ones(2, 3), torch.zeros(2, 3)

    def pin(self: torch.Tensor) -> torch.Tensor:
        calls.append(("pin", self))
        return self

    def to(self: torch.Tensor, *where: object, **how: object) -> torch.Tensor:
        calls.append(("to", how))
        return self

    with mock.patch.object(torch.Tensor, "pin_memory", pin), mock.patch.object(torch.Tensor, "to", to):
        x, y = on_device(tensors, torch.device("cuda"))
        assert x is tensors[0] and y is tensors[1]
        assert [what for what, _ in calls] == ["pin", "pin", "to", "to"]
        assert all(how == {"non_blocking": True} for what, how in calls if what == "to")
        calls.clear()
        on_device(tensors, torch.device("cpu"))
        assert [what for what, _ in calls] == ["to", "to"]


def test_memory_freed_by_one_system_is_not_reserved_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing cuBLAS workspaces returns them to torch's cache. So the cache is emptied next, and then peaks reset."""
    done: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: done.append("workspaces"), raising=False)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    MemoryMeter(torch.device("cuda", 0))
    assert done == ["workspaces", "empty_cache", "reset_peak_memory_stats"]
