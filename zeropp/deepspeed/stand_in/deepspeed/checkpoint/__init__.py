"""Tools for checkpoints."""

__all__ = ["UNIVERSAL_CHECKPOINT_INFO"]

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
"""The key that scripts set in their ``client_state``; it is saved, and says nothing that zeropp needs."""
