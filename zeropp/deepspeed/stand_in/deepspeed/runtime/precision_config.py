"""Blocks of the configuration that say what is computed in which precision."""

from collections.abc import Mapping
from typing import Any

from zeropp.config import load_config
from zeropp.config.blocks import Bf16Config

__all__ = ["get_bfloat16_config"]


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16Config:
    """The ``bf16`` block of a configuration, which may be called ``bfloat16``; with defaults for what is not said."""
    blocks = {name: param_dict[name] for name in ("bf16", "bfloat16") if name in param_dict}
    return load_config(blocks).bf16
