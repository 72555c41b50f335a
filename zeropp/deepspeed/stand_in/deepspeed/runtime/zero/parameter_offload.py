"""The object behind ``engine.optimizer.parameter_offload``."""

from zeropp.deepspeed.refused_modules import refused
from zeropp.deepspeed.training_optimizer import ParameterOffload

__all__ = ["DeepSpeedZeRoOffload", "ZeROOrderedDict", "ensure_zero_ordered_dict"]

DeepSpeedZeRoOffload = ParameterOffload
# Modules keep torch's own dict of parameters: weights are gathered by hooks, and none is looked up for it.
_WHY = "zeropp leaves a module's dict of parameters as it is"
ZeROOrderedDict = refused("runtime.zero.parameter_offload.ZeROOrderedDict", _WHY)
ensure_zero_ordered_dict = refused("runtime.zero.parameter_offload.ensure_zero_ordered_dict", _WHY)
