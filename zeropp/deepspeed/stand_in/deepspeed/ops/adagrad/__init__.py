"""Adagrad, by ``torch.optim.Adagrad``."""

from ..torch_optimizers import Adagrad

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(Adagrad):
    """Creates a ``torch.optim.Adagrad``; ``offload_optimizer`` in the configuration decides if it steps on the host."""
