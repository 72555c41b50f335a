"""Error feedback and rotation reduce the quantization error of Adam's first moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zeropp_kernels import message_layout, quantize_, reduce_, state_layout

WORKERS, STEPS, NUMEL = 4, 200, 8192
SWITCHES = [(False, False), (False, True), (True, True)]  # rotate, feedback
Noise = Callable[[torch.Generator], Tensor]


def student(generator: torch.Generator) -> Tensor:
    """Return heavy-tailed noise: Student's t with four degrees of freedom."""
    chi = torch.randn(4, NUMEL, generator=generator).square().mean(0).sqrt()
    return torch.randn(NUMEL, generator=generator) / chi


def lognormal(generator: torch.Generator) -> Tensor:
    """Return noise with heavier tails than :func:`student` and with very different sizes per coordinate."""
    sizes = torch.randn(NUMEL, generator=torch.Generator().manual_seed(5)).mul_(1.5).exp_()
    tails = torch.randn(NUMEL, generator=generator).mul_(0.7).exp_()
    return torch.randn(NUMEL, generator=generator) * tails * sizes


def gradients(step: int, noise: Noise) -> list[Tensor]:
    """Return one gradient per worker: a common part that is the same in every step, plus noise of the worker."""
    common = 0.1 * noise(torch.Generator().manual_seed(0))
    return [common + noise(torch.Generator().manual_seed(1 + step * WORKERS + worker)) for worker in range(WORKERS)]


def error_energy(noise: Noise, beta: float, rotate: bool, feedback: bool) -> float:
    """Return the relative error energy of Adam's first moment (beta 0.9) with int4 sums, over the second half."""
    states = [torch.zeros(state_layout(NUMEL, 4).nbytes, dtype=torch.uint8) for _ in range(WORKERS)]
    nbytes = message_layout(NUMEL, 4).nbytes
    messages, mean = torch.empty(WORKERS * nbytes, dtype=torch.uint8), torch.empty(NUMEL)
    exact, found, energy, total = torch.zeros(NUMEL), torch.zeros(NUMEL), 0.0, 0.0
    for step in range(STEPS):
        shares = gradients(step, noise)
        for worker, share in enumerate(shares):
            message = messages[worker * nbytes : (worker + 1) * nbytes]
            state = states[worker] if feedback else None
            quantize_(share, message, bits=4, rotate=rotate, state=state, beta=beta)
        reduce_(messages, mean, count=WORKERS, bits=4, rotate=rotate, scale=1 / WORKERS)
        exact = 0.9 * exact + 0.1 * torch.stack(shares).mean(0)
        found = 0.9 * found + 0.1 * mean
        if step >= STEPS // 2:
            energy += (found - exact).square().sum().item()
            total += exact.square().sum().item()
    return energy / total


@pytest.mark.every(2)
@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize("noise", [student, lognormal])
def test_less_error_after_adam_s_average(noise: Noise, beta: float) -> None:
    plain, feedback, both = (error_energy(noise, beta, *switches) for switches in SWITCHES)
    print(f"relative error energy: plain {plain:.3g}, feedback {feedback:.3g}, hadamard + feedback {both:.3g}")
    assert feedback < plain / 2
    assert both < feedback and both < plain / 5


@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_feedback_sends_lost_values_later(beta: float) -> None:
    """A value far below the step of its group arrives on average with feedback; without feedback it is always lost."""
    x, state = torch.zeros(128), torch.zeros(state_layout(128, 4).nbytes, dtype=torch.uint8)
    x[0], x[1] = 7.0, 0.1
    message, out, total = torch.empty(message_layout(128, 4).nbytes, dtype=torch.uint8), torch.empty(128), 0.0
    for _ in range(200):
        quantize_(x, message, bits=4, state=state, beta=beta)
        reduce_(message, out, count=1, bits=4)
        total += out[1].item()
    assert abs(total - 20.0) <= 0.5 / (1 - beta) + 0.5
