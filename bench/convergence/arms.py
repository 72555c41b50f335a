"""The arms (ways to communicate), the seeds, and the settings of a comparison."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields

import torch

SEEDS = (11, 23, 37, 53, 71)
"""Seeds of initial weights and of the order of data. All arms use the same seeds, so differences are paired."""

_WEIGHTS = {"zero_quantized_weights": True}
_GRADIENTS = {"zero_quantized_gradients": True}
_PP = {**_WEIGHTS, **_GRADIENTS}


@dataclass(frozen=True)
class Arm:
    """One way to communicate.

    Attributes:
        label: name in tables.
        zero: keys of the ``zero_optimization`` block.
        own: keys of the ``zeropp`` block.
        weights: "config" to encode weights as configured; "delta4" or "lossless" for encoded differences of weights,
            which `bench.convergence.weights` computes, because virtual ranks have no cached weights.
    """

    label: str
    zero: dict[str, object] = field(default_factory=dict)
    own: dict[str, object] = field(default_factory=dict)
    weights: str = "config"

    def config(self, wire: str) -> dict[str, object]:
        """Return the configuration for zeropp: all parameters are sharded; ``wire`` is the dtype of plain gradients."""
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **self.zero}
        return {"zero_optimization": zero, "zeropp": dict(self.own), "communication_data_type": wire}


_LOCO = {"zeropp_loco_param": {}}  # err_beta 0.8, which is DeepSpeed's default
_HALF = {"zeropp_loco_param": {"err_beta": 0.5}}
_FULL = {"zeropp_loco_param": {"err_beta": 0.0}}  # the whole quantization error is added to the next gradient
_INT4 = {"gradient_bits": {"local": 4, "cross": 4}}
_ROTATED = {"hadamard": True}

ARMS = {
    "plain": Arm("plain, or lossless weights", weights="lossless"),
    "qwz": Arm("qwZ alone", _WEIGHTS),
    "qgz": Arm("qgZ alone", _GRADIENTS),
    "zeropp": Arm("ZeRO++", _PP),
    "loco": Arm("ZeRO++, LoCo cross", {**_PP, **_LOCO}),
    "loco-both": Arm("ZeRO++, LoCo both", {**_PP, **_LOCO}, {"feedback": "both"}),
    "loco-half": Arm("ZeRO++, LoCo cross, err_beta 0.5", {**_PP, **_HALF}),
    "loco-0": Arm("ZeRO++, LoCo cross, err_beta 0", {**_PP, **_FULL}),
    "hadamard": Arm("ZeRO++, hadamard", _PP, _ROTATED),
    "hadamard-loco": Arm("ZeRO++, hadamard, LoCo cross", {**_PP, **_LOCO}, _ROTATED),
    "hadamard-loco-half": Arm("ZeRO++, hadamard, LoCo cross, err_beta 0.5", {**_PP, **_HALF}, _ROTATED),
    "hadamard-loco-0": Arm("ZeRO++, hadamard, LoCo cross, err_beta 0", {**_PP, **_FULL}, _ROTATED),
    "int4": Arm("ZeRO++, int4 on both hops", _PP, _INT4),
    "delta4": Arm("delta4 weights, plain gradients", weights="delta4"),
    "delta4-qgz-loco": Arm("delta4 weights, qgZ, LoCo cross", {**_GRADIENTS, **_LOCO}, weights="delta4"),
    "delta4-loco": Arm(
        "delta4 weights, hadamard, LoCo cross, err_beta 0", {**_GRADIENTS, **_FULL}, _ROTATED, weights="delta4"
    ),
}
"""Name -> arm. ZeRO++'s gradients are int8 inside nodes and int4 between nodes, unless the arm sets other bits."""

DEFAULT_ARMS = (
    "plain", "qwz", "qgz", "zeropp", "loco", "loco-both", "loco-half", "hadamard", "hadamard-loco-0", "int4", "delta4",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of one comparison. The model is examples/gpt.py, the text the standard library's sources.

    Attributes:
        batch: windows of ``seq_len`` bytes per virtual rank and step.
        warmup: number of steps in which the learning rate rises; then it falls as a cosine to a tenth of ``lr``.
        sample: number of steps between measurements of gradients.
        windows: windows of validation text at the end; an eighth of them are used during training.
        compute: dtype of the model's arithmetic. Its weights always have bfloat16 values.
        wire: dtype of gradients that are not quantized.
    """

    steps: int = 1500
    layers: int = 4
    d_model: int = 192
    heads: int = 4
    seq_len: int = 64
    batch: int = 1
    nodes: int = 2
    local: int = 2
    lr: float = 1e-3
    warmup: int = 100
    sample: int = 5
    windows: int = 512
    validate_every: int = 250
    device: str = "cpu"
    compute: str = "fp32"
    wire: str = "bf16"

    def fault(self) -> str | None:
        """Return an error text for the command line if the settings are invalid, else None."""
        for each in fields(self):
            value, flag = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            least = {"warmup": 0, "windows": 8}.get(each.name, 1)  # validation during training uses windows // 8
            if isinstance(value, int) and value < least:
                return f"{flag} {value}: expected at least {least}"
        if not 0.0 < self.lr < 1.0:
            return f"--lr {self.lr}: expected more than 0 and less than 1"
        if self.steps <= self.warmup:
            return f"--steps {self.steps}: expected more than --warmup {self.warmup}, after which is measured"
        if self.d_model % self.heads:
            return f"--d-model {self.d_model}: expected a multiple of --heads {self.heads}"
        known = {"device": r"cpu|cuda(:\d+)?", "compute": "fp32|bf16", "wire": "fp32|bf16|fp16"}
        for name, pattern in known.items():
            if not re.fullmatch(pattern, getattr(self, name)):
                return f"--{name} {getattr(self, name)}: expected {pattern}"
        if self.device != "cpu" and not torch.cuda.is_available():
            return f"--device {self.device}: this torch ({torch.__version__}) finds no GPU"
        return None

    def stem(self, arm: str, seed: int) -> str:
        """Return the name of a run's files, which contains a hash of the settings and of the arm's definition."""
        text = json.dumps([asdict(self), asdict(ARMS[arm])], sort_keys=True)
        return f"{arm}-{seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
