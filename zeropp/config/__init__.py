"""Configuration: DeepSpeed's JSON format, loaded into checked, documented and immutable objects.

This package defines the names, types, defaults and support status of all settings. It imports no other part of zeropp
and does not implement the settings.
Start with `top`, then read `loading`. `supported` stores the support status of each field.
"""

from zeropp.config.base import ConfigError, UnsupportedConfigError
from zeropp.config.blocks import Bf16Config, ExtensionConfig, Fp16Config
from zeropp.config.loading import ConfigSource, load_config
from zeropp.config.supported import require_stage_for_offload, require_supported
from zeropp.config.top import Config
from zeropp.config.zero_block import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig

__all__ = [
    "Bf16Config",
    "Config",
    "ConfigError",
    "ConfigSource",
    "ExtensionConfig",
    "Fp16Config",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "UnsupportedConfigError",
    "ZeroConfig",
    "load_config",
    "require_stage_for_offload",
    "require_supported",
]
