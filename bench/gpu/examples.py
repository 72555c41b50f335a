"""The scripts of ``examples/`` on a GPU, with a few steps each."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial

from bench.gpu.part import Ended, Outcome, Part, State, Step, last_lines, last_words, missing
from bench.gpu.scale import Scale
from bench.step_time.launch import torchrun

__all__ = ["PART"]

_SAVED = "--checkpoint={folder}/run --resume --metrics={folder}/metrics.jsonl --sample=20 --validate-windows=8"
_FOLDER = "--folder={folder}/run"
_SCRIPTS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "train_gpt": (("tqdm",), (f"--steps=6 {_SAVED}", f"--steps=9 {_SAVED}")),
    "hf_trainer": (
        ("transformers", "accelerate", "safetensors"),
        (f"--steps=30 {_FOLDER}", f"--steps=40 {_FOLDER} --resume"),
    ),
    "lightning_gpt": (("lightning",), (f"--devices=1 --precision=bf16-mixed --windows=64 {_FOLDER}",)),
    "deepspeed_style": ((), ("--steps=4 --save={folder}/run", "--steps=6 --resume={folder}/run")),
    "trl_style_loop": ((), ("--steps=4",)),
    "train_fsdp2": ((), ("--steps=4",)),
}
"""Name of a script -> packages that it needs, and the arguments of each of its starts; the second start resumes."""
_LAUNCHED = {"hf_trainer": ["-m", "zeropp.compat.deepspeed", sys.executable]}
_STANDING_IN = ("hf_trainer", "trl_style_loop")
_NOT_FINITE = re.compile(r"(?:loss|reward)\w*\W{1,4}(?:nan|-?inf)\b", re.IGNORECASE)
_SECONDS = 90.0  # time limit of a script
_WIDTH = 300  # characters of a table cell


def steps(scale: Scale) -> list[Step]:
    """Return one step per script, which makes all its starts."""
    # Start without torchrun: after a failure, torchrun's own messages would hide the last lines of the script.
    _, environment = torchrun(1, [])
    environment |= {"HF_HUB_OFFLINE": "1"}
    return [
        Step(
            name, ["sh", "-ec", _starts(name, flags)], _SECONDS, partial(_read, name), environment, _lacks(name)
        )
        for name, flags in scale.examples.items()
    ]  # fmt: skip


def _starts(name: str, flags: Sequence[str]) -> str:
    """Return a shell script with one line per start; a failed start ends it."""
    command = [sys.executable, *_LAUNCHED.get(name, []), f"examples/{name}.py", *flags]
    return "\n".join(shlex.join([*command, *arguments.split()]) for arguments in _SCRIPTS[name][1])


def _lacks(name: str) -> str | None:
    if name == "train_fsdp2":
        return "needs two cards: FSDP2 needs a process group, and the script refuses a single rank"
    found = missing(*_SCRIPTS[name][0])
    if found is None and name in _STANDING_IN and missing("deepspeed") is None:
        return "DeepSpeed is installed, and zeropp's stand-in for it refuses to hide it; use another environment"
    return found


def _read(name: str, ended: Ended) -> Outcome:
    if ended.code is None:
        return Outcome(State.UNFINISHED, [], last_words(ended))
    said = "; ".join(last_lines(ended, 4)).replace(str(ended.folder), ".")
    # "|", which tqdm's progress bars contain, would end the table cell. An untrained model prints unprintable bytes.
    said = "".join(each if each.isprintable() else " " for each in said.replace("|", "/"))[-_WIDTH:]
    row = {"example": name, "exit code": str(ended.code), "seconds": f"{ended.seconds:.0f}", "last lines": said}
    if ended.code:
        return Outcome(State.WRONG, [row], last_words(ended, 12))
    spoilt = _NOT_FINITE.search(ended.log.read_text(errors="replace"))
    if spoilt is not None:
        return Outcome(State.WRONG, [row], f"it printed {spoilt[0]!r}; {last_words(ended, 12)}")
    return Outcome(State.MEASURED, [row])


PART = Part(
    "examples",
    "Examples on one card",
    ["example", "exit code", "seconds", "last lines"],
    steps,
    notes=(
        "One rank, few steps, each script as its first lines say, but without torchrun. train_gpt, hf_trainer and "
        "deepspeed_style save a checkpoint and start a second time, from it; seconds are those of both starts.",
    ),
    needs=("pydantic",),
    keeps_wrong=True,
)
