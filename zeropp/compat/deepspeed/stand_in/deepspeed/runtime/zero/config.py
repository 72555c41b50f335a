"""The ``zero_optimization`` block."""

from zeropp.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from zeropp.config.zero import ZeroConfig

__all__ = ["DeepSpeedZeroConfig", "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"]

DeepSpeedZeroConfig = ZeroConfig
DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizerConfig
DeepSpeedZeroOffloadParamConfig = OffloadParamConfig
