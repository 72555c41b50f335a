"""Tools for checkpoints."""
