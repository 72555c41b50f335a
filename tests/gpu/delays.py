"""Training with artificially delayed comm streams or computation, to find missing waits.

Code that does not wait for the delayed work computes with wrong values, and the losses and weights show it.

On a GPU the delays are sleep kernels (``torch.cuda._sleep``) at the start of each piece of work of a comm stream and of
each block's forward and backward. On CPU the model computes in the caller's thread, comm streams are threads, and the
delays are ``time.sleep``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeropp
from tests.support.branching_models import make_config
from zeropp.comm import streams
from zeropp.comm.streams import CommStreams, Event, make_stream
from zeropp.engine import engine
from zeropp.params import gradient

__all__ = ["CYCLES", "Delays", "Trained", "sleep", "train"]

CYCLES = 2_000_000  # GPU clock cycles of one sleep kernel, about a millisecond
SECONDS = 0.003  # seconds of one sleep on CPU
STEPS = 5


def sleep(device: str) -> None:
    """Let the GPU's current stream sleep without blocking the host, or, on CPU, let the calling thread sleep."""
    if device == "cuda":
        torch.cuda._sleep(CYCLES)
    else:
        time.sleep(SECONDS)


@dataclass
class Delays:
    """The places that are delayed, and the waits that are removed so that the delay changes results.

    Attributes:
        device: "cpu" or "cuda".
        comm_streams: kinds of comm streams ("gather", "reduce", "refresh") whose work begins with a sleep.
        computing: True if each block's forward and backward begins with a sleep, too.
        unwaited: kinds of comm streams whose events are replaced by finished events, so that no caller waits for them.
        unordered: kinds of comm streams that do not wait for the model's stream.
        slept: number of sleeps, by kind of comm stream or "computing".
    """

    device: str
    comm_streams: tuple[str, ...] = ()
    computing: bool = False
    unwaited: tuple[str, ...] = ()
    unordered: tuple[str, ...] = ()
    slept: dict[str, int] = field(default_factory=dict)

    def sleep(self, kind: str) -> None:
        self.slept[kind] = self.slept.get(kind, 0) + 1
        sleep(self.device)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Return a context manager: engines constructed inside it have delayed comm streams."""

        def make(kind: str, device: torch.device, *, sends: bool, overlap: bool, hosted: bool) -> CommStreams:
            return CommStreams(lambda link: _Late(kind, self, device, hosted))

        with mock.patch.object(engine, "make_comm_streams", make):
            yield

    def hook(self, module: nn.Module, *args: object) -> None:
        if self.computing:
            self.sleep("computing")


class _Late:
    """A stream that sleeps before its work, for one kind of comm stream."""

    def __init__(self, kind: str, delays: Delays, device: torch.device, hosted: bool) -> None:
        self.kind, self.delays = kind, delays
        # On CPU the stream is always a thread, because work that runs at once in the caller cannot be late.
        name, on_card = f"late {kind}", device.type == "cuda"
        self.inner = make_stream(name, device, sends=False, overlap=True, hosted=hosted or not on_card)

    def run(self, *works: Callable[[], object], after: Event | None = None) -> Event:
        begin = [lambda: self.delays.sleep(self.kind)] if self.kind in self.delays.comm_streams else []
        with contextlib.ExitStack() as stack:
            if self.kind in self.delays.unordered:
                stack.enter_context(mock.patch.object(torch.cuda.Stream, "wait_stream", lambda *streams: None))
            event = self.inner.run(*begin, *works, after=after)
        return streams.DONE if self.kind in self.delays.unwaited else event

    def allocate(self, work: Callable[[], None]) -> None:
        self.inner.allocate(work)

    def free(self, work: Callable[[], None]) -> None:
        self.inner.free(work)

    def abandon(self) -> None:
        self.inner.abandon()

    def close(self) -> None:
        self.inner.close()


class Block(nn.Module):
    """A residual block of a LayerNorm and a two-layer MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@dataclass
class Trained:
    """Losses, gradient norms and weights of a training, compared bit by bit."""

    losses: list[float]
    norms: list[float | None]
    state: dict[str, Tensor]

    def differs(self, other: Trained) -> list[str]:
        """Return the names of the losses, norms and weights whose bits differ; a NaN differs from everything."""
        found = [f"loss {i}" for i, (a, b) in enumerate(zip(self.losses, other.losses, strict=True)) if a != b]
        found += [f"norm {i}" for i, (a, b) in enumerate(zip(self.norms, other.norms, strict=True)) if a != b]
        return found + [name for name, value in self.state.items() if not torch.equal(value, other.state[name])]


def train(
    device: str, settings: dict[str, Any], delays: Delays | None = None, micros: int = 2, late: bool | None = None
) -> Trained:
    """Train five blocks for ``STEPS`` steps with clipping and ``micros`` micro-batches per step, from one seed.

    Args:
        device: "cpu" or "cuda".
        settings: settings for :func:`make_config`.
        delays: delays in force; None for none.
        micros: micro-batches per step.
        late: None for plain AdamW. True or False for fused AdamW, a NaN loss in the third step, and step sync results
            that the host reads late (True) or waits for (False).
    """
    torch.manual_seed(0)
    width = 256 if device == "cuda" else 16
    model = nn.Sequential(*(Block(width) for _ in range(5))).to(device)
    config = {**make_config(**settings), "gradient_clipping": 0.3, "gradient_accumulation_steps": micros}
    generator = torch.Generator().manual_seed(3)
    batches = torch.randn(STEPS, micros, 8, width, generator=generator).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=None if late is None else True)
    # Reduce on a comm stream, as with several ranks. Without this patch, a single rank adds gradients to the shard
    # without a message.
    on_streams = mock.patch.object(gradient, "adds_directly", lambda path, shard: False)
    with on_streams, delays.in_force() if delays is not None else contextlib.nullcontext():
        optimizer = zeropp.ZeroOptimizer(inner, model, config)
    if late is not None:
        optimizer.step_sync.defers_read = late
    if delays is not None:
        for block in model:
            block.register_forward_pre_hook(delays.hook)
            block.register_full_backward_pre_hook(delays.hook)
    losses: list[Tensor] = []
    norms: list[float | None] = []
    for number, step in enumerate(batches):
        for x in step:
            loss = model(x.requires_grad_()).float().square().mean()
            optimizer.backward(loss * float("nan") if late is not None and number == 2 else loss)
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if late is None:
            norms.append(optimizer.grad_norm)
    if late is not None:
        assert (optimizer.step_sync.reads == 0) is late, "the host must wait for sums only if late is False"
        norms += [optimizer.grad_norm, float(optimizer.skipped_steps)]
    found = Trained(torch.stack(losses).tolist(), norms, zeropp.full_state(model))
    optimizer.close()
    return found
