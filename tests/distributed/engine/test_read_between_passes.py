"""Between passes, weights of stages 0 to 2 can be read; edits, and backwards through values read, are refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zeropp
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks

Use = Callable[[nn.Parameter], Any]


def averages(lerp: Callable[..., object], p: nn.Parameter) -> list[Tensor]:
    kept = [torch.zeros(p.shape, dtype=p.dtype)]
    lerp(kept, [p], 0.5)
    return kept


PRECISIONS: dict[str, tuple[dict[str, object], torch.dtype]] = {
    "float32": ({}, torch.float32),
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16),
}
READS: dict[str, Use] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "add": lambda p: p + 1,
    "matmul": lambda p: p @ p.T,
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "contains": lambda p: 3 in p,
    "equal": lambda p: torch.equal(p, p),
    "norm": lambda p: p.norm(),
    "item": lambda p: p.sum().item(),
    "tolist": lambda p: p.tolist(),
    "format": lambda p: f"{p.sum():.3f}",
    "numpy": lambda p: np.asarray(p.detach().double().numpy()),
    "to": lambda p: p.to(torch.float64),
    "clone": lambda p: p.clone(),
    "view": lambda p: p.view(-1),
    "cat": lambda p: torch.cat([p, p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "foreach in place, of another": lambda p: averages(torch._foreach_lerp_, p),
    "copied to another": lambda p: torch.zeros(p.shape).copy_(p),
    "averaged": lambda p: torch.zeros(p.shape, dtype=p.dtype).mul_(0.5).add_(p, alpha=0.5),
    "linear": lambda p: F.linear(torch.ones(1, p.shape[-1], dtype=p.dtype), p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "deepcopy": lambda p: copy.deepcopy(p),
    "parameter": lambda p: nn.Parameter(p.detach().clone()),
    "save": lambda p: torch.save(p.detach(), io.BytesIO()),
}
EDITS: dict[str, Use] = {
    "add_": lambda p: p.add_(1),
    "iadd": lambda p: p.__iadd__(1),
    "mul_ of data": lambda p: p.data.mul_(2),
    "setitem": lambda p: p.__setitem__(0, 0.0),
    "zero_ of a row": lambda p: p[0].zero_(),
    "fill_ of a view": lambda p: p.detach().view(-1).fill_(1),
    "copy_": lambda p: p.copy_(torch.zeros(p.shape)),
    "foreach_add_": lambda p: torch._foreach_add_([p], 1),
    "out": lambda p: torch.add(p, 1, out=p.data),
    "data": lambda p: setattr(p, "data", torch.zeros(p.shape, dtype=p.dtype)),
    "init": lambda p: nn.init.normal_(p),
    "init by name": lambda p: nn.init.zeros_(tensor=p),
    "relu": lambda p: F.relu(p, inplace=True),
    "unvector": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
}


class Trained:
    """A model in stage 0, 1 or 2, and its optimizer.

    Args:
        stage: ZeRO stage.
        precision: key of PRECISIONS.
        hook: not used.
    """

    def __init__(self, stage: int, precision: str = "float32", hook: bool = False) -> None:
        torch.manual_seed(3)
        top, self.dtype = PRECISIONS[precision]
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
        self.model[0].bias.requires_grad_(False)
        inner = torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=0.1)
        self.optimizer = zeropp.ZeroOptimizer(inner, self.model, make_config(stage=stage, **top))

    def loss(self) -> Tensor:
        x = torch.full((2, 8), 1.0 + dist.get_rank(), dtype=self.dtype)
        return self.model(x).float().square().mean()

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def apart(self, when: str, read: dict[str, Tensor]) -> list[str]:
        """Return the names of read weights that differ from the present main weights, each followed by ``when``."""
        found = []
        for name, main in zeropp.full_state(self.model).items():
            same = read[name].dtype == self.dtype and torch.equal(read[name], main.to(self.dtype))
            found += [] if same else [f"{name} {when}"]
        return found

    def read(self) -> dict[str, Tensor]:
        return {name: parameter.data.clone() for name, parameter in self.model.named_parameters()}


def newest(stage: int, precision: str) -> tuple[list[str], int]:
    """Read all weights after wrapping, between forward and backward, and after steps, a load and an edit.

    Args:
        stage: ZeRO stage.
        precision: key of PRECISIONS.

    Returns:
        Weights that differed from the main weights, and the number of different values of one weight after three steps.
    """
    trained = Trained(stage, precision)
    wrong = trained.apart("at first", trained.read())
    seen = set()
    for number in range(3):
        loss = trained.loss()
        wrong += trained.apart(f"before backward {number}", trained.read())
        loss.backward()
        trained.optimizer.step()
        # Read at once: the refresh of the step may still be in flight, and the read must wait for it.
        read = trained.read()
        wrong += trained.apart(f"after step {number}", read)
        seen.add(float(read["0.weight"].sum()))
        trained.optimizer.zero_grad()
    trained.model.load_state_dict({name: value * 2 for name, value in trained.model.state_dict().items()})
    wrong += trained.apart("after a load", trained.read())
    with zeropp.zero.GatheredParameters(list(trained.model.parameters()), modifier_rank=0), torch.no_grad():
        trained.model[2].weight.fill_(0.25)
    wrong += trained.apart("after an edit", trained.read())
    return wrong, len(seen)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_values_are_whole_and_newest(stage: int, precision: str) -> None:
    assert run_ranks(2, newest, stage, precision) == [([], 3)] * 2


def same(found: object, wanted: object) -> bool:
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else np.array_equal(a, b) for a, b in pairs)


def operations(stage: int) -> list[str]:
    """Read weights on rank 1 only, by all functions of READS.

    Returns:
        Functions whose result differs from that for a plain parameter, and an error if weights have changed.
    """
    trained = Trained(stage)
    trained.step()
    whole, read = zeropp.full_state(trained.model), trained.read()
    wrong = []
    if dist.get_rank() == 1:
        for name, use in READS.items():
            for path in ("0.weight", "2.weight"):
                plain = nn.Parameter(whole[path].clone())
                with torch.no_grad():
                    wrong += [] if same(use(trained.model.get_parameter(path)), use(plain)) else [f"{name} of {path}"]
    now = zeropp.full_state(trained.model), trained.read()
    wrong += [] if same(now, (whole, read)) else ["weights have changed"]
    trained.step()
    return wrong


@pytest.mark.parametrize("stage", [0, 2])
def test_every_read_is_that_of_a_plain_parameter(stage: int) -> None:
    assert run_ranks(2, operations, stage) == [[], []]


def edits(stage: int) -> list[str]:
    """Try all edits of EDITS.

    Returns:
        Edits that were not refused by the expected error, and errors if main weights or cached weights have changed.
    """
    trained = Trained(stage)
    trained.step()
    whole, read = zeropp.full_state(trained.model), trained.read()
    wrong = []
    for name, use in EDITS.items():
        for path in ("0.weight", "0.bias", "2.weight"):
            try:
                with torch.no_grad():
                    use(trained.model.get_parameter(path))
                wrong.append(f"{name} of {path}")
            except RuntimeError as error:
                expected = f"on parameter '{path}': between passes its values can be read and not edited"
                if expected not in str(error) or "GatheredParameters" not in str(error):
                    wrong.append(f"{name} of {path}: {error}")
    wrong += [] if same(zeropp.full_state(trained.model), whole) else ["main weights have changed"]
    wrong += [] if same(trained.read(), read) else ["cached weights have changed"]
    trained.step()
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_are_refused(stage: int) -> None:
    assert run_ranks(2, edits, stage) == [[], []]


def backwards(stage: int) -> list[float]:
    """Take a step after refused backwards through weights that were read between passes, and a step without them.

    Returns:
        Gradient norms of the two steps.
    """
    norms = []
    for tried in (True, False):
        trained = Trained(stage)
        trained.step()
        if tried:
            penalty = trained.model[0].weight.square().sum()
            assert penalty.requires_grad and float(penalty) > 0
            for loss in (penalty, trained.loss() + trained.model[2].weight.norm()):
                with pytest.raises(RuntimeError, match=r"read between passes.*inside the model's forward"):
                    loss.backward()
            trained.optimizer.zero_grad()
            # A frozen weight records no graph, so there is no backward to refuse.
            assert not trained.model[0].bias.square().sum().requires_grad
        trained.step()
        norms.append(float(trained.optimizer.grad_norm))
    return norms


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_through_a_read_is_refused(stage: int) -> None:
    for with_tries, without in run_ranks(2, backwards, stage):
        assert with_tries == without


def refused() -> list[str]:
    """Read a weight in states in which this rank has no up-to-date whole values that may be read.

    Returns:
        Reads that were not refused by the expected error.
    """
    trained = Trained(2)
    trained.step()
    wrong = []

    def look(when: str, expected: str = "zeropp keeps its values elsewhere") -> None:
        try:
            trained.model[2].weight.sum()
            wrong.append(when)
        except RuntimeError as error:
            wrong.extend([] if expected in str(error) else [f"{when}: {error}"])

    with zeropp.zero.GatheredParameters([trained.model[0].weight]):
        look("beside what is gathered")
    held = trained.model[2].weight.data
    trained.optimizer.offload_states()
    look("off the device")
    with pytest.raises(RuntimeError, match=r"'2.weight' whose memory was freed.*reload_states"):
        held[0].sum()
    assert held.shape == (5, 8)
    trained.optimizer.reload_states()
    wrong += [] if same(held, trained.model[2].weight.data) else ["other values than before"]
    # Step post-hooks may edit main weights, so the refresh of cached weights is delayed to the next forward.
    handle = trained.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    trained.step()
    look("before a renewal that was put off")
    handle.remove()
    trained.loss()
    wrong += trained.apart("after that forward", trained.read())
    trained.optimizer.close()
    look("closed", "close()")
    return wrong


def test_reads_of_outdated_weights_are_refused() -> None:
    assert run_ranks(2, refused) == [[], []]
