"""Compilation ahead of time, for GPUs that need not be there: ``python -m zeropp_kernels.aot``."""
