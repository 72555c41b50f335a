"""Sizes of all parts: on a GPU, and in a dry run on a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from bench.common.flags import add_model_flags

__all__ = ["CARD", "DRY", "Look", "Model", "Ranks", "Scale"]


@dataclass(frozen=True)
class Model:
    """A GPT that systems are compared on.

    Attributes:
        name: size, as shown in the table.
        flags: arguments of ``bench.step_time`` for its sizes.
        side_by_side: True if all systems fit on the GPU together, so that they can take turns.
    """

    name: str
    flags: Sequence[str]
    side_by_side: bool = False

    @property
    def numel(self) -> int:
        """Number of parameters without biases and norms."""
        parser = argparse.ArgumentParser()
        add_model_flags(parser)
        args = parser.parse_args(list(self.flags))
        return 12 * args.layers * args.d_model**2 + 2 * args.vocab * args.d_model


@dataclass(frozen=True)
class Look:
    """Sizes of the part ``look``.

    Attributes:
        checks: step -> arguments of pytest that select its tests.
        large: model whose step is limited by the GPU.
        small: model whose step is limited by the host.
        systems: systems compared on the large model, in order, each alone.
        turns: arguments of ``bench.step_time`` for the number of rounds and steps.
        compiled: environment variables of the step with compiled blocks.
        offloaded: system of ``bench.offload.race`` -> arguments for its rounds, steps and ways.
    """

    checks: dict[str, Sequence[str]]
    large: Model
    small: Model
    systems: Sequence[str]
    turns: Sequence[str]
    compiled: dict[str, str]
    offloaded: dict[str, Sequence[str]]


@dataclass(frozen=True)
class Ranks:
    """Sizes of the part with several ranks over NCCL.

    Attributes:
        plan: (program, ranks, names) in order: program of :mod:`bench.gpu.nccl_ranks`, number of ranks, and names of
            trained cases or of ways to lose a rank.
        numel: elements that a rank sends to each other rank in the test of collectives.
        width: width of the model.
        blocks: number of its blocks.
        batch: sequences per rank.
        length: tokens per sequence.
        steps: training steps of each case.
        hang_timeout: ``hang_timeout`` of the engine in seconds, if a rank is lost.
        patience: ``hang_timeout`` in seconds, if no rank is lost.
        starting: seconds for processes to start and to wrap a model.
    """

    plan: Sequence[tuple[str, int, Sequence[str]]]
    numel: int
    width: int
    blocks: int
    batch: int
    length: int
    steps: int
    hang_timeout: float
    patience: float
    starting: float


@dataclass(frozen=True)
class Scale:
    """Sizes of one kind of run.

    Attributes:
        device: "cuda" or "cpu".
        workers: number of pytest workers for the kernels' tests.
        look: sizes of the part ``look``.
        examples: script of ``examples/`` -> its additional arguments.
        chosen: step of the part ``bits`` -> arguments of pytest that select its tests.
        models: models of the part ``engine``, in order.
        turns: arguments of ``bench.step_time`` for their rounds and steps.
        staged: numbers of ranks that share the GPU, one job each.
        staged_flags: arguments of ``bench.step_time`` for these jobs.
        bandwidth: (step, MiB of bfloat16, argument ``-k`` of pytest, seconds) of each bandwidth measurement.
        pinned_mebibytes: MiB of the copies over the bus in the part ``kernels``.
        calls: (calls per round, rounds) for host times.
        counted: operations whose counters are read; empty for all.
        counted_mebibytes: MiB of bfloat16 values in each of them.
        offloaded: step of the offload tests -> arguments of pytest that select its tests.
        offload_models: models of the part ``offload``.
        offload_systems: systems of ``bench.offload.race``, in order: the reference first, the slowest last.
        offload_turns: arguments of ``bench.offload.race`` for rounds and steps.
        slow_turns: the same arguments for the system with states in files.
        bus_mebibytes: MiB of float32 in a unit whose copies are measured.
        ranks: sizes of the part with several ranks over NCCL.
    """

    device: str
    workers: int
    look: Look
    examples: dict[str, Sequence[str]]
    chosen: dict[str, Sequence[str]]
    models: Sequence[Model]
    turns: Sequence[str]
    staged: Sequence[int]
    staged_flags: Sequence[str]
    bandwidth: Sequence[tuple[str, int, str, float]]
    pinned_mebibytes: int
    calls: tuple[int, int]
    counted: Sequence[str]
    counted_mebibytes: int
    offloaded: dict[str, Sequence[str]]
    offload_models: Sequence[Model]
    offload_systems: Sequence[str]
    offload_turns: Sequence[str]
    slow_turns: Sequence[str]
    bus_mebibytes: int
    ranks: Ranks

    @property
    def dry(self) -> bool:
        """True for a dry run, which runs all code without measuring."""
        return self.device == "cpu"


def _model(layers: int, width: int, heads: int, length: int, batch: int, vocab: int = 256) -> list[str]:
    sizes = {"layers": layers, "d-model": width, "heads": heads, "seq-len": length, "batch": batch, "vocab": vocab}
    return [f"--{name}={value}" for name, value in sizes.items()]


_TWO_RANKS = (
    "stage 3", "qwZ + qgZ", "stage 1", "stage 2", "stage 3, nothing kept", "states on the host", "weights on the host",
    "lossless, stage 1", "delta4, stage 1", "sums by the backend", "two engines", "other modules",
)  # fmt: skip
_FOUR_RANKS = (
    "stage 3", "hpZ", "ZeRO++", "LoCo", "lossless", "delta4", "MiCS", "accumulation", "stage 3, nodes", "stage 1",
    "states on the host", "other modules", "sums by the backend", "two engines",
)  # fmt: skip
_LOST = ("killed", "raising", "stopped", "closing")
_ONE, _THREE = Model("1 B", _model(20, 2048, 16, 2048, 4)), Model("3 B", _model(32, 2816, 22, 2048, 2))
CARD = Scale(
    device="cuda",
    workers=8,
    look=Look(
        # Each takes less than 60 s beside the others; none is a test that measures times.
        checks={
            "kernels": ("-m", "not campaign", "-k", "257 or same_bits"),
            "engine": ("-m", "gpu", "-k", "not staged and not timed"),
            "hops": ("-m", "gpu", "-k", "identity or bf16-local"),
        },
        large=Model("1.3 B", _model(24, 2048, 16, 2048, 4, 32000)),
        small=Model("0.37 B", _model(24, 1024, 16, 2048, 1, 32000)),
        systems=("plain_clipped", "fsdp2_clipped", "zeropp_clipped", "deepspeed_clipped"),
        turns=("--rounds=3", "--discard=1", "--steps=4"),
        compiled={},
        offloaded={
            "fsdp2": ("--rounds=1", "--steps=2", "--warm=2"),
            "cpu": ("--rounds=1", "--steps=2", "--warm=2", "--ways=lazy"),
        },
    ),
    examples=dict.fromkeys(
        ("train_gpt", "hf_trainer", "lightning_gpt", "deepspeed_style", "trl_style_loop", "train_fsdp2"), ()
    ),
    chosen={
        "kernels": ("-m", "not campaign"),
        "streams": ("-m", "gpu"),
        "hops": ("-m", "gpu"),
        "engine": ("-m", "gpu"),
        "large": ("-m", "gpu"),
    },
    # 8192 tokens per step. 4096 for the 3 B model, whose states (16 bytes per parameter) leave less room for
    # activations.
    models=(
        Model("0.3 B", _model(24, 1024, 16, 2048, 4), side_by_side=True),
        _ONE,
        _THREE,
    ),
    turns=("--rounds=8", "--discard=2", "--steps=3"),
    staged=(2, 4),
    staged_flags=(*_model(4, 1024, 16, 256, 4), "--rounds=4", "--discard=1", "--steps=2"),
    bandwidth=(
        *((f"{size} MiB", size, "zeropp", 50.0) for size in (256, 1024, 2048, 64, 16, 1)),
        ("256 MiB eager", 256, "eager or (zeropp and copy)", 50.0),
        ("256 MiB compiled", 256, "compiled or (zeropp and copy)", 120.0),
        # Apart from zeropp's own steps, because a step that is too late has no results at all, and DeepSpeed's
        # extension takes long to build.
        ("256 MiB peers", 256, "peers or (zeropp and copy)", 150.0),
    ),
    pinned_mebibytes=256,
    calls=(100, 9),
    counted=(),
    counted_mebibytes=256,
    offloaded={"offload": ("-m", "gpu"), "late offload": ("-m", "gpu")},
    offload_models=(_ONE, _THREE),
    offload_systems=("fsdp2", "cpu", "none", "ratio", "nvme"),
    offload_turns=("--rounds=2", "--steps=2", "--warm=2"),
    slow_turns=("--rounds=1", "--steps=1", "--warm=1", "--ways=lazy"),
    bus_mebibytes=256,
    ranks=Ranks(
        plan=(
            ("collectives", 2, ()),
            ("train", 2, _TWO_RANKS),
            ("lose", 2, _LOST),
            ("collectives", 4, ()),
            ("train", 4, _FOUR_RANKS),
            ("launch-queue", 1, ()),
            ("lose", 4, _LOST),
        ),
        numel=1 << 20,
        width=256,
        blocks=6,
        batch=4,
        length=32,
        steps=10,
        hang_timeout=10.0,
        patience=30.0,
        starting=20.0,
    ),
)
"""Sizes on a GPU."""

DRY = Scale(
    device="cpu",
    workers=1,
    look=Look(
        checks={
            "kernels": ("-k", "quantize and 255 and dtype0"),
            "engine": ("-k", "not staged"),
            "hops": ("-k", "cpu and identity"),
        },
        large=Model("tiny", _model(2, 64, 2, 32, 2, 300)),
        small=Model("tinier", _model(1, 32, 2, 16, 1, 300)),
        systems=("plain_clipped", "fsdp2_clipped", "zeropp_clipped", "deepspeed_clipped"),
        turns=("--rounds=2", "--discard=1", "--steps=3"),
        compiled={"TORCHDYNAMO_DISABLE": "1"},  # a C++ compiler is slow, and not on every machine
        offloaded={"fsdp2": ("--rounds=1", "--steps=1", "--warm=1")},
    ),
    examples={"train_gpt": ("--layers=1", "--d-model=32", "--heads=2", "--seq-len=16"), "deepspeed_style": ()},
    chosen={
        "kernels": ("-k", "quantize and 255 and (dtype0 or bfloat16)"),
        "streams": ("-k", "cpu and (nobody or (comm streams and kept))"),
        "hops": ("-k", "cpu and (identity or bf16-local)"),
        "engine": (),
    },
    models=(Model("tiny", _model(2, 64, 2, 32, 2), side_by_side=True),),
    turns=("--rounds=2", "--discard=1", "--steps=3"),
    staged=(2,),
    staged_flags=(*_model(1, 192, 2, 16, 2), "--rounds=2", "--discard=1", "--steps=4"),
    bandwidth=(("1 MiB", 1, "(zeropp or eager) and (copy or dequantize)", 40.0),),
    pinned_mebibytes=1,
    calls=(2, 2),
    counted=("copy", "dequantize int8"),
    counted_mebibytes=1,
    offloaded={"offload": ("-k", "cpu and (losses or nothing_else and weights)")},
    offload_models=(Model("tiny", _model(2, 64, 2, 32, 2)),),
    offload_systems=("fsdp2", "cpu"),
    offload_turns=("--rounds=1", "--steps=1", "--warm=2"),
    slow_turns=(),
    bus_mebibytes=1,
    ranks=Ranks(
        plan=(
            ("collectives", 2, ()),
            ("train", 2, _TWO_RANKS),
            ("lose", 2, _LOST),
            ("train", 4, _FOUR_RANKS[:8]),
            ("launch-queue", 1, ()),
        ),
        numel=64,
        width=64,
        blocks=3,
        batch=2,
        length=8,
        steps=3,
        hang_timeout=4.0,
        patience=20.0,
        starting=60.0,
    ),
)
"""Sizes of a dry run: one step of each kind."""
