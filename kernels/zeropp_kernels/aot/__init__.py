"""Ahead-of-time compilation of the kernels, for GPUs that need not be present: ``python -m zeropp_kernels.aot``."""
