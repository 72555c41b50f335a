"""Adagrad: torch's."""

from ..torch_optimizers import Adagrad

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(Adagrad):
    """Makes a ``torch.optim.Adagrad``; where it steps is said by ``offload_optimizer``."""
