"""The stand-in's configuration classes behave like DeepSpeed's. The test runs in a process that finds the stand-in."""

from __future__ import annotations

import subprocess
import sys

from zeropp.compat.deepspeed import environment

SCRIPT = """
from typing import Optional

import pytest
from pydantic import Field, ValidationError

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import get_bfloat16_config
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles


NEW = dict(deprecated=True, new_param="sizes", new_param_fn=lambda x: [x])


class Own(DeepSpeedConfigModel):
    size: int = Field(3, alias="own_size")
    old: Optional[int] = Field(None, json_schema_extra=NEW)
    sizes: Optional[list[int]] = None


assert Own(size=4).size == Own(own_size=4).size == 4 and Own(size="auto").size == 3
assert Own(old=5).sizes == [5]
for wrong, error in ((dict(sise=1), ValidationError), (dict(old=1, sizes=[1]), AssertionError)):
    with pytest.raises(error):
        Own(**wrong)

config = DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_allreduce_op": "SUM"})
assert config.train_micro_batch_size_per_gpu == 4 and config.gradient_allreduce_op == "sum"
config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = 6, 2, None
config._configure_train_batch_size()
assert config.gradient_accumulation_steps == 3
config.train_batch_size = 7
with pytest.raises(AssertionError, match="train_batch_size 7"):
    config._configure_train_batch_size()

assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled and not get_bfloat16_config({}).enabled
assert get_accelerator().device_count() == 3
with pytest.raises(RuntimeError, match="MultipleAllGatherHandles is not in zeropp's stand-in"):
    MultipleAllGatherHandles([])
"""


def test_configurations_are_made_as_there() -> None:
    variables = {**environment(), "LOCAL_SIZE": "3", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
