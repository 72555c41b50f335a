"""Lion: zeropp's."""

from ..torch_optimizers import Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]

# One class: where it steps is said by ``offload_optimizer``.
DeepSpeedCPULion = FusedLion = Lion
