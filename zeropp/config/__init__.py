"""Configuration: DeepSpeed-style JSON as checked, documented, unchangeable objects."""

from zeropp.config.errors import ConfigError, UnsupportedConfigError
from zeropp.config.extension import ExtensionConfig
from zeropp.config.load import ConfigSource, load_config
from zeropp.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from zeropp.config.precision import Bf16Config, Fp16Config
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
]
