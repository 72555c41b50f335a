"""The engine on one GPU: results of plain torch, no host wait in forward and backward, memory as planned."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeropp
from tests.support.owned_memory import owned_bytes
from zeropp.comm.streams import CudaStream
from zeropp.comm.timers import StreamStalls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

VOCAB, WIDTH, STEPS = 97, 200, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randint(0, VOCAB, (4, 32), generator=generator).cuda()


def config(**zero: object) -> dict[str, object]:
    return {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "gradient_clipping": 0.3,
        "zeropp": {"unit_min_blocks": 0},
    }


def train_plain(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches():
        loss = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("zero", [{}, {"stage3_max_reuse_distance": 0}, {"overlap_comm": False}, {"stage": 1}], ids=str)
def test_float64_training_equals_plain_torch(zero: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Model().double().cuda()
    reference = copy.deepcopy(model)
    expected = train_plain(reference)
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, config(**zero))
    losses = []
    for tokens in batches():
        loss = model(tokens)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-9)
    state = zeropp.full_state(model)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value.cpu(), atol=1e-9, rtol=0)


def test_forward_backward_and_a_fused_step_never_wait_for_the_device() -> None:
    """With a single rank the step sync is read late without ``static_graph``, so no step waits for the device."""
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), model, config())
    for step, tokens in enumerate(batches()):
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            optimizer.backward(model(tokens))
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.step_sync.reads == 0 and optimizer.skipped_steps == 0


def test_a_step_that_the_host_decides_waits_once() -> None:
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, config())
    for tokens in batches():
        optimizer.backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.step_sync.reads == STEPS


def allocated() -> int:
    """Return the bytes of tensors on the GPU, without cuBLAS's workspaces, which cuBLAS keeps for each stream."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_owned_bytes_equal_the_plan_and_released_memory_is_free() -> None:
    torch.manual_seed(0)
    before = allocated()
    plan = zeropp.plan.memory(Model(), config(), 1)
    model = Model().cuda()
    optimizer = zeropp.ZeroOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), model, config())
    for tokens in batches():
        optimizer.backward(model(tokens))
        optimizer.step()
        optimizer.zero_grad()
    assert owned_bytes(optimizer) == {**plan.terms, "held_gradients": 0, "gathered": 0}
    assert allocated() - before < plan.total + plan.largest_unit


def test_a_dropped_stream_has_finished() -> None:
    stream = CudaStream(torch.device("cuda", torch.cuda.current_device()))
    event = torch.cuda.Event()

    def work() -> None:
        torch.cuda._sleep(100_000_000)
        event.record(torch.cuda.current_stream())

    stream.run(work)
    assert not event.query()
    del stream
    assert event.query()


def test_waits_of_the_model_s_stream_are_timed_without_a_host_wait() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    told: list[float] = []
    stalls = StreamStalls(device, lambda unit, kind, seconds: told.append(seconds))
    stream = CudaStream(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def work() -> None:
        begin.record(torch.cuda.current_stream())
        torch.cuda._sleep(100_000_000)
        end.record(torch.cuda.current_stream())

    event = stream.run(work)
    timer = stalls.timer("unit", "gather")
    timer.begin()
    event.wait(1.0)
    timer.end()
    assert told == [], "a stall was reported before synchronize(), so the host waited"
    torch.cuda.synchronize()
    stalls.collect()
    assert told == [pytest.approx(begin.elapsed_time(end) / 1000, rel=0.2)]
