"""Class of the object that scripts read as ``engine.optimizer.parameter_offload``."""

from zeropp.deepspeed.refused_modules import refused
from zeropp.deepspeed.training_optimizer import ParameterOffload

__all__ = ["DeepSpeedZeRoOffload", "ZeROOrderedDict", "ensure_zero_ordered_dict"]

DeepSpeedZeRoOffload = ParameterOffload
# DeepSpeed replaces a module's dict of parameters, to gather a weight when it is looked up. zeropp gathers in hooks, so
# modules keep torch's dict.
_WHY = "zeropp leaves a module's dict of parameters as it is"
ZeROOrderedDict = refused("runtime.zero.parameter_offload.ZeROOrderedDict", _WHY)
ensure_zero_ordered_dict = refused("runtime.zero.parameter_offload.ensure_zero_ordered_dict", _WHY)
