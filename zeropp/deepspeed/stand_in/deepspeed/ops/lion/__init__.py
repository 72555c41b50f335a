"""Lion, by zeropp's own class."""

from ..torch_optimizers import Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]

# One class for both names: ``offload_optimizer`` in the configuration decides if the optimizer steps on the host.
DeepSpeedCPULion = FusedLion = Lion
