"""Wrapping draws one blueprint, which equals the blueprint that a plan draws of the same model on the meta device."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zeropp
from tests.support.all_parameter_kinds import Mixed
from tests.support.branching_models import make_config
from tests.support.rank_pool import run_ranks
from zeropp.setup import blueprint, build
from zeropp.setup.blueprint import Blueprint, draw_blueprint

DERIVED = [name for name in vars(blueprint) if name.startswith(("choose_", "require_"))]
DERIVED += ["computed_with", "form_units", "divide_steps", "buffer_layouts"]
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "hpZ, qwZ, qgZ": {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    "stage 2, lossless, bf16": {"stage": 2, "bf16": {"enabled": True}, "weight_codec": "lossless"},
    "offload": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "host_memory_limit": 1 << 30},
    "files": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "files, limited": {"offload_param": {"device": "nvme"}, "host_memory_limit": 1 << 30},
}


@contextlib.contextmanager
def counted() -> Iterator[tuple[Counter[str], list[Blueprint]]]:
    """Count the calls of the functions that derive parts of a blueprint, and collect the blueprints of wrapping.

    Yields:
        Number of calls by name of the function, and the blueprints. Both fill while the block runs.
    """
    calls, drawn = Counter[str](), list[Blueprint]()

    def counting(name: str, plain: Any) -> Any:
        def count(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return plain(*args, **options)

        return count

    def keep(*args: Any, **options: Any) -> Blueprint:
        drawn.append(draw_blueprint(*args, **options))
        return drawn[-1]

    with contextlib.ExitStack() as patched:
        for name in DERIVED:
            patched.enter_context(mock.patch.object(blueprint, name, counting(name, getattr(blueprint, name))))
        patched.enter_context(mock.patch.object(build, "draw_blueprint", keep))
        yield calls, drawn


def wrapped(settings: dict[str, Any], path: str) -> tuple[dict[str, int], int, list[str]]:
    """Wrap a model, and draw a second blueprint of the same model on the meta device.

    Args:
        settings: keys for ``make_config``.
        path: folder for settings with NVMe.

    Returns:
        Calls of each deriving function, number of units, and errors: one if the two blueprints differ, one if the
        engine's buffers differ from its blueprint.
    """
    blocks = {key: {**value, "nvme_path": path} if value == {"device": "nvme"} else value
              for key, value in settings.items()}  # fmt: skip
    config, model = make_config(**blocks), Mixed(torch.float32, freeze=True)
    world, rank = dist.get_world_size(), dist.get_rank()
    with counted() as (calls, drawn):
        optimizer = zeropp.ZeroOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model, config)
    (own,) = drawn
    bare = Mixed(torch.float32, freeze=True, device="meta")
    again = draw_blueprint(bare, zeropp.load_config(config), world, 2, torch.device("cpu"), rank=rank)
    engine = optimizer.engine
    wrong = [] if own == again else ["another blueprint of a model without values"]
    made = [(b.layout, b.placement, b.compute_dtype, b.trainable) for b in engine.buffers]
    outlined = [(b.layout, u.placement, b.key.dtype, b.key.trainable) for u in own.units for b in u.buffers]
    wrong += [] if made == outlined and engine.mode == own.mode else ["another engine than the blueprint's"]
    optimizer.close()
    return dict(calls), len(own.units), wrong


@pytest.mark.parametrize("name", SETTINGS)
def test_everything_is_derived_once_and_a_plan_derives_the_same(name: str, tmp_path: Path) -> None:
    for calls, units, wrong in run_ranks(4, wrapped, SETTINGS[name], str(tmp_path), local_world_size=2):
        assert wrong == [] and units > 1
        once = dict.fromkeys(DERIVED, 1) | {"buffer_layouts": units, "choose_ctas_limits": 0}
        assert Counter(calls) == Counter({key: count for key, count in once.items() if count})
