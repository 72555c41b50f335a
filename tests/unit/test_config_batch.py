"""Batch size, micro-batch size and accumulation steps: missing values are derived, contradictions are errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp.config import ConfigError, load_config

# These tests seldom set a stage, so ignore the warning about that.
pytestmark = pytest.mark.filterwarnings("ignore:the configuration does not set")

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resolve(world_size: int, *triple: int | None) -> tuple[int | None, int | None, int]:
    given = {key: value for key, value in zip(KEYS, triple, strict=True) if value is not None}
    return load_config(given).resolve_batch(world_size)


@pytest.mark.parametrize(
    ("triple", "expected"),
    [
        ((None, None, None), (None, None, 1)),
        ((None, None, 5), (None, None, 5)),
        ((48, None, None), (48, 12, 1)),
        ((None, 3, None), (12, 3, 1)),
        ((48, 3, None), (48, 3, 4)),
        ((48, None, 4), (48, 3, 4)),
        ((None, 3, 4), (48, 3, 4)),
        ((48, 3, 4), (48, 3, 4)),
    ],
)
def test_missing_batch_values_are_derived(
    triple: tuple[int | None, ...], expected: tuple[int | None, int | None, int]
) -> None:
    assert resolve(4, *triple) == expected


@pytest.mark.parametrize(
    "triple", [(48, 3, 5), (50, 3, None), (50, None, 3), (50, None, None), (2, None, None), (2, 3, None)]
)
def test_disagreement_names_all_three_and_the_world_size(triple: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(4, *triple)
    message = str(caught.value)
    assert "world size 4" in message
    for key, value in zip(KEYS, triple, strict=True):
        assert (f"{key} {value} (given)" if value is not None else f"{key} ") in message
    assert message.count("(given)") == sum(value is not None for value in triple)
    assert message.count("(derived)") == sum(value is None for value in triple)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sampled_from([0, 1, 2, None]))
def test_any_two_give_the_third(micro: int, steps: int, world_size: int, left_out: int | None) -> None:
    full = (micro * steps * world_size, micro, steps)
    triple = [None if index == left_out else value for index, value in enumerate(full)]
    assert resolve(world_size, *triple) == full


@pytest.mark.parametrize("world_size", [0, -1, True])
def test_world_size_must_be_positive(world_size: int) -> None:
    with pytest.raises(ConfigError, match="world_size: got"):
        resolve(world_size, 8, None, None)
