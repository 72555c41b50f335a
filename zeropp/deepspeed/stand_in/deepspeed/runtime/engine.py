"""Class of the engine that ``initialize`` returns, under DeepSpeed's name."""

from zeropp.deepspeed.training_engine import Engine

__all__ = ["DeepSpeedEngine"]

DeepSpeedEngine = Engine
