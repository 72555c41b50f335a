"""The float16 loss scale: its documented sequence for overflows at given steps, and refusals of unscaled losses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from zeropp.config import load_config
from zeropp.params.loss_scale import LossScale, LossScaling
from zeropp.setup.choices import choose_loss_scaling


def scale(**keys: Any) -> LossScale:
    config = load_config({"zero_optimization": {"stage": 3}, "fp16": {"enabled": True, **keys}})
    return LossScale(choose_loss_scaling(config), 0.5)


def values(of: LossScale, overflows: str) -> list[float]:
    """Return the scale after each step; "x" is a step that overflows, "." is one that does not."""
    found = []
    for each in overflows:
        of.update(overflow=each == "x")
        found.append(of.value)
    return found


def test_it_begins_with_its_power() -> None:
    assert scale().value == 65536 and scale(initial_scale_power=3).value == 8


def test_one_overflow_is_let_pass_and_the_next_halves() -> None:
    assert values(scale(initial_scale_power=4), ".x.x.x") == [16, 16, 16, 8, 8, 4]


def test_without_hysteresis_each_overflow_halves() -> None:
    assert values(scale(initial_scale_power=4, hysteresis=1), "xx.x") == [8, 4, 4, 2]


def test_it_doubles_where_a_window_lies_between_and_again_after_as_many() -> None:
    # The first doubling is at step 2, counted from 0: the number of steps before it must be a multiple of the window.
    assert values(scale(initial_scale_power=4, loss_scale_window=2), "." * 7) == [16, 16, 32, 32, 64, 64, 128]
    assert values(scale(initial_scale_power=4, loss_scale_window=2, hysteresis=1), ".x....") == [16, 8, 8, 8, 16, 16]


def test_doubling_fills_the_hysteresis() -> None:
    assert values(scale(initial_scale_power=4, loss_scale_window=2), "x...xx") == [16, 16, 16, 32, 32, 16]


def test_consecutive_hysteresis_counts_overflows_in_a_row_alone() -> None:
    assert values(scale(initial_scale_power=4, consecutive_hysteresis=True), "x.x.xx") == [16, 16, 16, 16, 16, 8]


def test_it_ends_at_the_least_scale() -> None:
    own = scale(initial_scale_power=2, hysteresis=1, min_loss_scale=3)
    assert values(own, "x") == [3]
    with pytest.raises(RuntimeError, match=r"not finite at a loss scale of 3, fp16\.min_loss_scale"):
        own.update(overflow=True)


def test_a_static_scale_stays() -> None:
    own = scale(loss_scale=128)
    assert not own.dynamic and values(own, "x" * 5 + "." * 5) == [128.0] * 10


def test_factor_takes_it_out() -> None:
    assert scale(loss_scale=4).factor == 0.125


def test_state() -> None:
    """A run that is saved and resumed after any step has the same scales as a run without interruption."""
    pattern = "..x..xx....x.x....."
    whole = values(scale(initial_scale_power=8, loss_scale_window=3), pattern)
    for cut in range(len(pattern)):
        first = scale(initial_scale_power=8, loss_scale_window=3)
        found = values(first, pattern[:cut])
        second = scale(initial_scale_power=1, loss_scale_window=3)
        second.load_state_dict(first.state_dict())
        assert found + values(second, pattern[cut:]) == whole
    static = scale(loss_scale=4)
    static.load_state_dict(first.state_dict())
    assert static.value == 4  # a static scale keeps the configured value


def test_losses_are_scaled_in_float32() -> None:
    loss = torch.tensor(2.0, dtype=torch.float16)
    assert scale(initial_scale_power=20).apply(loss) == 2.0 * 2**20  # exceeds the range of float16
    off = LossScale(LossScaling(), 1.0)
    assert off.apply(loss) == 2.0 and off.apply(loss).dtype == loss.dtype
    assert off.value == off.factor == 1.0 and not off.dynamic


def begins(of: LossScale, weight: torch.Tensor) -> torch.Tensor:
    """Return a loss whose backward calls ``backward_begins``, as an engine's hooks on the model's outputs do."""
    output = weight * 2
    output.register_hook(lambda _: of.backward_begins(1, first=True))
    return output.sum()


def test_a_backward_without_scale_is_refused() -> None:
    own, weight = scale(), torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"optimizer\.backward\(loss\)"):
        begins(own, weight).backward()
    scaled = own.apply(begins(own, weight))
    with pytest.raises(RuntimeError, match="not scaled"):
        begins(own, weight).backward()  # this loss is not the one that was scaled
    scaled.backward()
    with pytest.raises(RuntimeError, match="not scaled"):
        begins(own, weight).backward()
    begins(LossScale(LossScaling(), 1.0), weight).backward()


def test_a_scaled_backward_that_fails_is_over() -> None:
    own, weight = scale(), torch.ones(2, requires_grad=True)
    loss = begins(own, weight)
    loss.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        own.apply(loss).backward()
    with pytest.raises(RuntimeError, match="not scaled"):
        begins(own, weight).backward()


def plain() -> LossScale:
    """Return a float32 loss scale that divides plain losses by the number of micro-batches, as DeepSpeed does."""
    own = LossScale(LossScaling(), 1.0)
    own.averages_unscaled = True
    return own


def test_a_loss_may_be_edited_in_place_after_it_was_scaled() -> None:
    own, weight = plain(), torch.ones(2, requires_grad=True)
    output = weight * 2
    output.register_hook(lambda _: own.backward_begins(4, first=True))
    loss = own.apply(output.sum())
    loss += 1.0
    loss.backward()
    assert own.factor == 1.0
    begins_after = weight * 2
    begins_after.register_hook(lambda _: own.backward_begins(4, first=True))
    begins_after.sum().backward()
    assert own.factor == 0.25


def begins_window(of: LossScale, weight: torch.Tensor) -> torch.Tensor:
    output = weight * 2
    output.register_hook(lambda _: of.backward_begins(4, first=True))
    return output


@pytest.mark.parametrize("end", ["forget", "load"])
@pytest.mark.parametrize("scaled_by", ["this engine", "another"])
def test_a_plain_loss_is_refused_that_may_be_scaled_by_way_of_detached_outputs(scaled_by: str, end: str) -> None:
    """Gradient caching scales a loss of detached outputs, so the loss's backward never reaches the model.

    The engine then cannot tell if the model's backward belongs to a scaled loss. The refusal ends with the window.
    """
    own, weight = plain(), torch.ones(2, requires_grad=True)
    owner = own if scaled_by == "this engine" else plain()
    output = begins_window(own, weight)
    leaf = output.detach().requires_grad_()
    owner.apply(leaf.sum()).backward()
    with pytest.raises(RuntimeError, match=r"did not reach the engine's model.*call loss\.backward"):
        output.backward(leaf.grad)
    # Do as the error says: call backward on the plain loss, and apply the scale to the outputs' loss.
    own.apply((begins_window(own, weight) * leaf.grad).sum()).backward()
    assert own.factor == 1.0
    {"forget": owner.drop_losses, "load": lambda: owner.load_state_dict(owner.state_dict())}[end]()
    begins_window(own, weight).sum().backward()
    assert own.factor == 0.25


def test_gradients_of_a_loss_that_another_engine_has_scaled_are_refused() -> None:
    """The other engine's scale makes the gradients too large, even if this engine divides no losses."""
    half, own, weight = scale(), LossScale(LossScaling(), 1.0), torch.ones(2, requires_grad=True)
    output = begins_window(own, weight)
    leaf = output.detach().requires_grad_()
    half.apply(leaf.sum()).backward()
    with pytest.raises(RuntimeError, match="whether the loss of this backward is already scaled or divided"):
        output.backward(leaf.grad)


def test_where_nothing_is_divided_detached_outputs_are_as_in_torch() -> None:
    own, weight = LossScale(LossScaling(), 1.0), torch.ones(2, requires_grad=True)
    output = begins_window(own, weight)
    leaf = output.detach().requires_grad_()
    own.apply(leaf.sum()).backward()
    output.backward(leaf.grad)
    assert own.factor == 1.0


def test_a_loss_that_meets_its_model_by_another_way_leaves_nothing_behind() -> None:
    """A loss over two models is scaled by one engine, and its backward reaches that engine's model, as in a GAN.

    A plain loss of either model is then accepted.
    """
    first, second, weight = plain(), plain(), torch.ones(2, requires_grad=True)
    second.apply((begins_window(first, weight) + begins_window(second, weight)).sum()).backward()
    begins_window(first, weight).sum().backward()
    assert first.factor == 0.25 and second.factor == 1.0


def test_several_losses_of_one_backward_are_over_with_it() -> None:
    """The end of a backward ends all its scaled losses, also those that autograd reaches late."""
    own, weight = scale(), torch.ones(2, requires_grad=True)
    early = own.apply(weight.sum())
    late = own.apply(begins(own, weight))
    torch.autograd.backward([early, late])
    with pytest.raises(RuntimeError, match="not scaled"):
        begins(own, weight).backward()


def test_a_scaled_loss_keeps_its_scale() -> None:
    """A skipped step changes the scale, but gradients of a loss that was scaled before are divided by its own scale."""
    own, weight = scale(initial_scale_power=4, hysteresis=1), torch.ones(2, requires_grad=True)
    scaled = own.apply(begins(own, weight))
    own.update(overflow=True)
    scaled.backward()
    assert own.value == 8 and own.factor == 0.5 / 16


def test_two_scales_in_one_backward_are_refused() -> None:
    first, second, weight = (
        scale(initial_scale_power=4),
        scale(initial_scale_power=8),
        torch.ones(2, requires_grad=True),
    )
    with pytest.raises(RuntimeError, match="scales 256 and 16, of two engines; take each to a backward of its own"):
        (first.apply(begins(first, weight)) + second.apply(begins(second, weight))).backward()
    first.apply(begins(first, weight)).backward()
    equal = scale(initial_scale_power=4)
    (first.apply(begins(first, weight)) + equal.apply(begins(equal, weight))).backward()
    assert first.factor == equal.factor == 0.5 / 16


def test_a_backward_in_another_thread_has_its_own_scale() -> None:
    own, other = scale(initial_scale_power=4), scale(initial_scale_power=8)
    weights = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    others = other.apply(begins(other, weights[1]))

    def beside(_: torch.Tensor) -> None:
        thread = threading.Thread(target=others.backward)
        thread.start()
        thread.join()

    loss = begins(own, weights[0])
    loss.register_hook(beside)
    own.apply(loss).backward()
    assert own.factor == 0.5 / 16 and other.factor == 0.5 / 256
