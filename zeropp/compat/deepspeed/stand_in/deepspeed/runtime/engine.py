"""The engine that ``initialize`` returns."""

from zeropp.training import Engine

__all__ = ["DeepSpeedEngine"]

DeepSpeedEngine = Engine
