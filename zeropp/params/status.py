"""``ZeroParamStatus``: whether a parameter has its values, by DeepSpeed's names."""

from __future__ import annotations

from enum import Enum

__all__ = ["ZeroParamStatus"]


class ZeroParamStatus(Enum):
    """A parameter's ``ds_status``."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    # Nobody sees this here: who asks for a weight under way waits for it.
    INFLIGHT = 3
