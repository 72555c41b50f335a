"""Enumerations and configuration blocks of offloading."""

from enum import Enum

from .config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]


class OffloadDeviceEnum(str, Enum):
    """Storage tiers of offloaded memory; members equal the strings in the JSON."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Kinds of memory for ``offload_states(include=...)``, explained in :meth:`zeropp.ZeroOptimizer.offload_states`."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
