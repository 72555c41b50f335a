"""Benchmarks of offload: weights and optimizer states in host memory or in files, and the optimizer on the CPU."""
