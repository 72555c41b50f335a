"""The engine that ``initialize`` returns."""

from zeropp.deepspeed.training_engine import Engine

__all__ = ["DeepSpeedEngine"]

DeepSpeedEngine = Engine
