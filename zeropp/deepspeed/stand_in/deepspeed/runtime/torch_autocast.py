"""Placeholders for functions that read a communication dtype from parameters; zeropp stores none on parameters."""

from zeropp.deepspeed.refused_modules import refused

__all__ = ["get_comm_dtype", "has_comm_dtype"]

_WHY = "zeropp notes no dtype on parameters; gradients travel in communication_data_type"
get_comm_dtype = refused("runtime.torch_autocast.get_comm_dtype", _WHY)
has_comm_dtype = refused("runtime.torch_autocast.has_comm_dtype", _WHY)
