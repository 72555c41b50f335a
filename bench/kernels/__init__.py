"""The Triton kernels and their references, measured; ``python -m bench.kernels``."""
