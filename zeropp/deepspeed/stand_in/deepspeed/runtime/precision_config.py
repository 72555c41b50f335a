"""``get_bfloat16_config``: the configuration's ``bf16`` block."""

from collections.abc import Mapping
from typing import Any

from zeropp.config import load_config
from zeropp.config.blocks import Bf16Config

__all__ = ["get_bfloat16_config"]


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Bf16Config:
    """Return the block ``bf16`` (or its older name ``bfloat16``) of a configuration; missing keys get defaults."""
    blocks = {name: param_dict[name] for name in ("bf16", "bfloat16") if name in param_dict}
    return load_config(blocks).bf16
