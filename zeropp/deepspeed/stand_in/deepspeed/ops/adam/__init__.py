"""Adam on the host and on devices: torch's."""

from ..torch_optimizers import Adam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class DeepSpeedCPUAdam(Adam):
    """Makes a ``torch.optim.AdamW``, or ``Adam``; where it steps is said by ``offload_optimizer``."""


class FusedAdam(Adam):
    """Makes a ``torch.optim.AdamW``, or ``Adam``."""
