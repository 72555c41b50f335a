"""The names of ``deepspeed.zero``."""

from zeropp.access.gathered import GatheredParameters, register_external_parameter
from zeropp.deepspeed.extension import ZeroParamStatus
from zeropp.init.context import Init, MiCS_Init

from . import offload_config, partition_parameters, stage3, stage_1_and_2, tiling
from .parameter_offload import DeepSpeedZeRoOffload
from .stage3 import unwrap_model_for_generation
from .tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "tiling",
    "unwrap_model_for_generation",
]
