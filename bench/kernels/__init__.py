"""Benchmark of the Triton kernels and of their reference code; ``python -m bench.kernels``."""
