"""Configuration: DeepSpeed-style JSON as checked, documented, unchangeable objects.

Knows names, types, defaults and which settings have an effect; nothing of what they do.
Start with `top`, then `load`; `support` says of each field how far it reaches.
"""

from zeropp.config.errors import ConfigError, UnsupportedConfigError
from zeropp.config.extension import ExtensionConfig
from zeropp.config.load import ConfigSource, load_config
from zeropp.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from zeropp.config.precision import Bf16Config, Fp16Config
from zeropp.config.support import require_stage_for_offload, require_supported
from zeropp.config.top import Config
from zeropp.config.zero import ZeroConfig

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
