"""Partitions on disks."""

__all__ = ["MIN_SWAPPABLE_BYTES"]

# Scripts size models by it: smaller partitions stay in memory under DeepSpeed. zeropp goes by ``max_in_cpu`` alone.
MIN_SWAPPABLE_BYTES = 2**20
