"""Conversion of checkpoints, and copies of tensors for ``torch.save``."""

__all__ = ["UNIVERSAL_CHECKPOINT_INFO"]

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
"""Key that scripts set in their ``client_state``. zeropp saves its value and does not read it."""
