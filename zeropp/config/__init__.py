"""Configuration: DeepSpeed-style JSON as checked, documented, unchangeable objects.

Knows names, types, defaults and which settings have an effect; nothing of what they do.
Start with `top`, then `loading`; `supported` says of each field how far it reaches.
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
