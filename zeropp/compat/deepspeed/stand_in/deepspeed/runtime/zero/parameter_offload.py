"""The object behind ``engine.optimizer.parameter_offload``."""

from zeropp.training.facade import ParameterOffload

__all__ = ["DeepSpeedZeRoOffload"]

DeepSpeedZeRoOffload = ParameterOffload
