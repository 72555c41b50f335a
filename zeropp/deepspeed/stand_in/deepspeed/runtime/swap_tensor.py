"""A size that scripts read from DeepSpeed's module for swapping to NVMe."""

__all__ = ["MIN_SWAPPABLE_BYTES"]

# Scripts choose model sizes by this number: DeepSpeed keeps smaller shards in memory. zeropp does not use the number;
# ``max_in_cpu`` alone limits the shards that zeropp keeps in memory.
MIN_SWAPPABLE_BYTES = 2**20
