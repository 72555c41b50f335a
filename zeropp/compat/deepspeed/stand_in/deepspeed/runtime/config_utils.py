"""What DeepSpeed derives its configuration's blocks from."""

from zeropp.config.base import Block as DeepSpeedConfigModel

__all__ = ["DeepSpeedConfigModel"]
