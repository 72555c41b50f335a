"""Adam and AdamW, by ``torch.optim``."""

from ..torch_optimizers import Adam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class DeepSpeedCPUAdam(Adam):
    """Creates a ``torch.optim.AdamW`` or ``Adam``; ``offload_optimizer`` decides if it steps on the host."""


class FusedAdam(Adam):
    """Creates a ``torch.optim.AdamW`` or ``Adam``."""
