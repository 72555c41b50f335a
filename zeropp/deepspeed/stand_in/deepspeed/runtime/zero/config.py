"""The ``zero_optimization`` block of the configuration, under DeepSpeed's class names."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from zeropp.config.zero_block import (
    SPARSE_BLOCKS,
    LeafModuleConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    ZeroConfig,
)

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
]

DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizerConfig
DeepSpeedZeroOffloadParamConfig = OffloadParamConfig

_Names = Annotated[list[str], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]


class DeepSpeedZeroLeafModuleConfig(LeafModuleConfig):
    """zeropp's ``LeafModuleConfig`` with lists in place of tuples, because scripts compare them and append to them."""

    classes: _Names = Field(default_factory=lambda: list(SPARSE_BLOCKS))  # type: ignore[assignment]
    names: _Names = Field(default_factory=list)  # type: ignore[assignment]
    name_suffixes: _Names = Field(default_factory=list)  # type: ignore[assignment]


class DeepSpeedZeroConfig(ZeroConfig):
    """zeropp's ``ZeroConfig``, for scripts that read or complete the block before they build a whole configuration."""

    leaf_module: DeepSpeedZeroLeafModuleConfig = DeepSpeedZeroLeafModuleConfig()
