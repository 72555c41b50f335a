"""The ``zero_optimization`` block."""

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
    """As zeropp's, with lists, which scripts compare and add to."""

    classes: _Names = Field(default_factory=lambda: list(SPARSE_BLOCKS))  # type: ignore[assignment]
    names: _Names = Field(default_factory=list)  # type: ignore[assignment]
    name_suffixes: _Names = Field(default_factory=list)  # type: ignore[assignment]


class DeepSpeedZeroConfig(ZeroConfig):
    """As zeropp's, for whoever reads or completes a block before there is a configuration around it."""

    leaf_module: DeepSpeedZeroLeafModuleConfig = DeepSpeedZeroLeafModuleConfig()
